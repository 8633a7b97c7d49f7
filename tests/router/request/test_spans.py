"""Traces: what becomes of a request at the router and its workers, and that nothing is there where off."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pdserve import tracing
from pdserve.tracing import Tracer, Tracing
from tests.support.router.harness import disagg
from tests.support.router.mock_worker import Gate, answer, hang

CHAT = "/v1/chat/completions"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def traced(exporter: InMemorySpanExporter, ratio: float = 1.0) -> Tracer:
    return Tracer(Tracing(sample_ratio=ratio), "pdserve-router", exporter)


def of(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


async def test_a_request_is_a_trace_of_its_phases_and_workers_are_told_its_place() -> None:
    exporter = InMemorySpanExporter()
    async with disagg(tracer=traced(exporter)) as (harness, [prefill], [decode]):
        headers = {"traceparent": PARENT, "tracestate": "a=b", "x-request-id": "r-1"}
        assert (await harness.chat(headers=headers, stream=True)).status == 200
        await harness.settle()
        spans = of(exporter)
        first = spans.pop(f"POST {CHAT}")
        assert set(spans) == {"plan", "prefill", "publish", "first token", "stream"}
        context, parent = first.context, first.parent
        assert context is not None
        assert parent is not None
        assert (f"{context.trace_id:032x}", f"{parent.span_id:016x}") == tuple(PARENT.split("-")[1:3])
        for request in (*prefill.requests, *decode.requests):
            assert request.headers["traceparent"] == f"00-{PARENT[3:35]}-{context.span_id:016x}-01"
            assert request.headers["tracestate"] == "a=b"
        assert first.attributes is not None
        assert first.attributes["http.response.status_code"] == 200
        assert first.attributes["pdserve.request_id"] == "r-1"
        assert first.attributes["x-pdserve-decode"] == decode.id
        assert first.start_time is not None
        assert first.end_time is not None
        for span in spans.values():
            assert span.parent is not None
            assert span.parent.span_id == context.span_id
            assert span.start_time is not None
            assert span.end_time is not None
            slack = 2_000_000  # ns: uvloop's clock counts milliseconds
            assert first.start_time - slack <= span.start_time <= span.end_time
            assert span.end_time <= first.end_time + slack


@pytest.mark.parametrize("how", ["refused", "failed", "left"])
async def test_every_end_of_a_request_ends_its_trace(how: str) -> None:
    exporter = InMemorySpanExporter()
    async with disagg(tracer=traced(exporter)) as (harness, _, [decode]):
        if how == "refused":
            await harness.post(CHAT, b"{")
        elif how == "failed":
            decode.script(CHAT, answer(500, {}))
            await harness.chat()
        else:
            gate = Gate()
            decode.script(CHAT, hang(gate))
            client = await harness.connect()
            await client.send(CHAT, b'{"messages": []}')
            await gate.reached.wait()
            client.leave()
        await harness.until(lambda: f"POST {CHAT}" in of(exporter))
        span = of(exporter)[f"POST {CHAT}"]
        expected = {"refused": None, "failed": "status 500", "left": "the client left"}[how]
        assert span.status.description == expected


async def test_only_the_share_that_was_asked_for_is_traced_but_what_comes_traced_is() -> None:
    exporter = InMemorySpanExporter()
    async with disagg(tracer=traced(exporter, ratio=0.0)) as (harness, _, [decode]):
        await harness.chat()
        await harness.settle()
        assert exporter.get_finished_spans() == ()
        flags = decode.requests[-1].headers["traceparent"].rpartition("-")[2]
        assert not int(flags, 16) & 1  # workers leave it, too
        await harness.chat(headers={"traceparent": PARENT})
        await harness.until(lambda: f"POST {CHAT}" in of(exporter))


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """(its endpoint, what came)."""
    came: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            came.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", came
    server.shutdown()
    thread.join()
    server.server_close()


async def test_a_collector_gets_the_spans(collector: tuple[str, list[ExportTraceServiceRequest]]) -> None:
    endpoint, came = collector
    async with disagg(tracing=Tracing(endpoint=endpoint)) as (harness, _, _):
        for _ in range(3):
            assert (await harness.chat()).status == 200
    told = [resource for message in came for resource in message.resource_spans]
    names = [span.name for one in told for scope in one.scope_spans for span in scope.spans]
    assert names.count(f"POST {CHAT}") == 3
    service = {a.key: a.value.string_value for one in told for a in one.resource.attributes}["service.name"]
    assert service == "pdserve-router"


async def test_a_collector_that_is_away_hurts_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "EXPORT_TIMEOUT_S", 0.1)
    async with disagg(tracing=Tracing(endpoint="http://127.0.0.1:9/v1/traces")) as (harness, _, _):
        assert (await harness.chat()).status == 200


def test_without_a_collector_nothing_of_the_sdk_is_imported() -> None:
    program = (
        "import sys, pdserve.router.sharing.child, pdserve.engine.http.request\n"
        "from pdserve.tracing import Tracing, open_tracer\n"
        "assert open_tracer(Tracing(), 'x') is None\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
