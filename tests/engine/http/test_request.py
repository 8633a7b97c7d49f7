"""The record of a request: when its client has left, when it is answered, and its spans."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pdserve.engine.http.request import HttpRequest, RequestTracking, current_request
from pdserve.engine.http.timing import FirstToken
from pdserve.tracing import Tracer, Tracing, timed
from tests.support.engine.manager import Client, Manager, Tokenized, scope_of, serve, served


def test_a_client_that_leaves_while_sglang_computes_aborts_its_requests_at_once() -> None:
    async def app(manager: Manager, client: Client, receive: Any, send: Any) -> None:
        await receive()
        manager._init_req_state(Tokenized("a"))
        await manager._send_one_request(Tokenized("a", [1]))
        client.leave()
        # SGLang computes and looks at the connection only now and then
        assert (await receive())["type"] == "http.disconnect"

    manager, request, _ = served(app)
    assert manager.aborted == ["a"]
    assert request.is_cut_short


def test_a_client_that_leaves_during_tokenisation_aborts_the_request_once_it_is_sent() -> None:
    async def app(manager: Manager, client: Client, receive: Any, send: Any) -> None:
        await receive()
        manager._init_req_state(Tokenized("a"))
        client.leave()
        assert (await receive())["type"] == "http.disconnect"
        assert manager.aborted == []  # the scheduler would not know it yet, and would run it later
        await manager._send_one_request(Tokenized("a", [1]))

    manager, request, _ = served(app)
    assert manager.aborted == ["a"]
    assert request.is_cut_short


def test_the_end_of_an_answer_is_no_client_that_left() -> None:
    """uvicorn reports a disconnect once the last byte is sent, while a streaming app is still ending. SGLang
    sleeps for 2 s behind a stream; the next turn's pages are waited for from its end on.
    """
    states: list[bool] = []

    async def app(manager: Manager, client: Client, receive: Any, send: Any) -> None:
        await receive()
        manager._init_req_state(Tokenized("a"))
        await manager._send_one_request(Tokenized("a", [1]))
        manager.rid_to_state["a"].finished = True
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        states.append(records[0].answered.is_set())
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        states.append(records[0].answered.is_set())
        client.leave()
        assert (await receive())["type"] == "http.disconnect"

    records: list[HttpRequest] = []
    client, manager = Client(), Manager()

    async def bound(_scope: Any, receive: Any, send: Any) -> None:
        await app(manager, client, receive, send)

    asyncio.run(serve(bound, scope_of(), client, records.append))
    assert states == [False, True]
    assert not records[0].left.is_set()
    assert not records[0].is_cut_short


def test_a_client_that_leaves_after_the_last_token_cuts_nothing_short() -> None:
    async def app(manager: Manager, client: Client, receive: Any, send: Any) -> None:
        await receive()
        manager._init_req_state(Tokenized(["first-of-n", "a"]))  # SGLang never sends the first when n > 1
        await manager._send_one_request(Tokenized("a", [1]))
        manager.rid_to_state["a"].finished = True
        client.leave()
        for _ in range(3):  # everyone who asks is told
            assert (await receive())["type"] == "http.disconnect"

    manager, request, _ = served(app)
    assert request.left.is_set()
    assert not request.is_cut_short
    assert manager.aborted == []


def test_a_request_is_answered_even_when_reading_its_connection_failed() -> None:
    records: list[HttpRequest] = []

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0)

    async def receive() -> dict[str, Any]:
        raise OSError("broken")

    with contextlib.suppress(OSError):
        asyncio.run(RequestTracking(app, records.append)(scope_of(), receive, Client().send))
    assert records[0].answered.is_set()


def test_other_routes_pass_untouched() -> None:
    seen: list[Any] = []

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        seen.append(receive)

    async def receive() -> dict[str, Any]:
        raise AssertionError("not read by the middleware")

    asyncio.run(RequestTracking(app)(scope_of("/health"), receive, Client().send))
    assert seen == [receive]


PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def spans_of(app: Any) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    tracer = Tracer(Tracing(), "pdserve-decode", exporter)
    scope = scope_of("/v1/completions", (b"x-request-id", b"id-1"), (b"traceparent", PARENT))
    asyncio.run(serve(app, scope, Client(), tracer=tracer, role="decode"))
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
