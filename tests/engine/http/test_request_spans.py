"""The spans of a worker, around a scripted stand-in for SGLang."""

from __future__ import annotations

import asyncio
from typing import Any

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pdserve.engine.http.request import current_request
from pdserve.engine.http.request_spans import Traced
from pdserve.engine.http.timing import FirstToken
from pdserve.tracing import Tracer, Tracing, timed
from tests.support.engine.manager import Client, scope_of, serve

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def spans_of(app: Any) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    traced = Traced(app, Tracer(Tracing(), "pdserve-decode", exporter), "decode")
    scope = scope_of("/v1/completions", (b"x-request-id", b"id-1"), (b"traceparent", PARENT))
    asyncio.run(serve(traced, scope, Client()))
    return exporter


def test_a_workers_spans_stand_below_the_routers() -> None:
    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        record = current_request()
        assert record is not None
        record.first = FirstToken({"queue": 0.25, "pull": 0.5, "compute": 1.0})
        with timed("publish", pages=3):
            await asyncio.create_task(asyncio.sleep(0))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    exporter = spans_of(app)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    first = spans.pop("decode /v1/completions")
    assert first.parent is not None
    assert f"{first.parent.span_id:016x}" == "b7ad6b7169203331"
    assert first.attributes is not None
    assert first.attributes["pdserve.request_id"] == "id-1"
    assert first.attributes["http.response.status_code"] == 200
    assert list(spans) == ["publish", "queue", "pull", "compute"]
    assert first.context is not None
    for span in spans.values():
        assert span.parent is not None
        assert span.parent.span_id == first.context.span_id
    assert dict(spans["publish"].attributes or {}) == {"pages": 3}
    queue, pull = spans["queue"], spans["pull"]
    assert queue.start_time is not None
    assert queue.end_time is not None
    assert (queue.end_time - queue.start_time) // 1_000_000 in (249, 250)
    assert pull.start_time is not None
    assert abs(pull.start_time - queue.end_time) < 1000


def test_an_error_of_the_server_is_one_of_the_span() -> None:
    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    exporter = spans_of(app)
    [span] = exporter.get_finished_spans()
    assert span.status.description == "status 503"


def test_nothing_is_timed_where_nothing_is_traced() -> None:
    with timed("pool wait"):
        pass
