"""The record of a request: when its client has left, and when it is answered."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from pdserve.engine.http.request import HttpRequest, RequestTracking
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
