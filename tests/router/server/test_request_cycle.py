"""Requests of the hot routes on a connection: each test holds a target with a query to the same as one
without.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.router.server.request_cycle import RequestCycle
from tests.support.router.harness import chat_body, disagg
from tests.support.router.mock_worker import ANSWER, EVENTS, Gate, stream

CHAT = "/v1/chat/completions"
TARGETS = pytest.mark.parametrize("target", [CHAT, CHAT + "?api-version=1"])
BODY = json.dumps(chat_body()).encode()


def request(target: str, *lines: str, body: bytes = BODY, version: str = "1.1") -> bytes:
    head = "".join(f"{line}\r\n" for line in (f"POST {target} HTTP/{version}", "host: test", *lines))
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@TARGETS
async def test_pipelined_requests_are_answered_in_order(target: str) -> None:
    async with disagg() as (harness, _, [worker]):
        gate = Gate()
        worker.script(CHAT, stream(EVENTS, gate, 1))
        client = await harness.connect()
        streamed = request(target, body=json.dumps(chat_body(stream=True)).encode())
        others = b"GET /health HTTP/1.1\r\nhost: test\r\n\r\n" + request(CHAT) + request(CHAT + "?q")
        client.writer.write(streamed + others)
        await gate.reached.wait()
        gate.open.set()
        assert (await client.response()).body == b"".join(EVENTS)
        assert (await client.response()).json()["status"] == "ok"
        assert [(await client.response()).body for _ in range(2)] == [ANSWER, ANSWER]
        client.writer.write(request(target))
        assert (await client.response()).body == ANSWER


@TARGETS
async def test_a_client_that_asks_is_told_to_go_on(target: str) -> None:
    async with disagg() as (harness, _, [worker]):
        client = await harness.connect()
        whole = request(target, "expect: 100-continue")
        client.writer.write(whole[: -len(BODY)])
        assert (await client.head()).status == 100
        client.writer.write(BODY)
        assert (await client.response()).body == ANSWER
        assert worker.got(CHAT)[0].body == BODY


@TARGETS
@pytest.mark.parametrize("coding", ["length", "chunked"])
async def test_a_long_body_in_pieces_reaches_the_worker_as_it_is(target: str, coding: str) -> None:
    long = json.dumps(chat_body(user="u" * 400_000)).encode()
    pieces = [long[at : at + 50_000] for at in range(0, len(long), 50_000)]
    async with disagg(prefill=0) as (harness, _, [worker]):
        client = await harness.connect()
        if coding == "length":
            client.writer.write(request(target, body=long)[: -len(long)])
        else:
            client.writer.write(
                f"POST {target} HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n".encode()
            )
            pieces[:] = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces] + [b"0\r\n\r\n"]
        for piece in pieces:
            client.writer.write(piece)
            await client.writer.drain()
        assert (await client.response()).body == ANSWER
        assert worker.got(CHAT)[0].body == long


@TARGETS
async def test_a_trailer_changes_no_header(target: str) -> None:
    """A proxy that takes headers away may let trailers through."""
    body = json.dumps(chat_body()).encode()
    async with disagg(prefill=0) as (harness, _, [worker]):
        client = await harness.connect()
        head = (
            f"POST {target} HTTP/1.1\r\nhost: t\r\nx-request-id: mine\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        chunks = b"%x\r\n%b\r\n0\r\nX-Request-Id: others\r\nx-new: 1\r\n\r\n" % (len(body), body)
        for _ in range(2):  # the second on the kept connection
            client.writer.write(head.encode() + chunks)
            answer = await client.response()
            assert (answer.body, answer.headers["x-request-id"]) == (ANSWER, "mine")
        assert [request.headers["x-request-id"] for request in worker.got(CHAT)] == ["mine"] * 2


@TARGETS
@pytest.mark.parametrize(("lines", "version"), [(["connection: close"], "1.1"), ([], "1.0")])
async def test_the_connection_ends_with_the_answer_where_the_client_wants_that(
    target: str, lines: list[str], version: str
) -> None:
    async with disagg() as (harness, _, _):
        client = await harness.connect()
        client.writer.write(request(target, *lines, version=version))
        answer = await client.response()
        assert (answer.body, answer.headers["connection"]) == (ANSWER, "close")
        assert await client.reader.read() == b""


def test_a_header_with_a_line_end_in_it_is_not_sent() -> None:
    state: Any = SimpleNamespace(default_lines=b"date: today\r\n")
    wire: Any = SimpleNamespace(shared=state)
    serve: Any = None
    client = RequestCycle(wire, serve, "POST", CHAT.encode(), CHAT, [])
    client.start(200, [(b"x-pdserve-plan", b"fine")], 0)
    with pytest.raises(ValueError, match="end of a line"):
        client.start(200, [(b"x-pdserve-plan", b"a\r\nset-cookie: b")], 0)
