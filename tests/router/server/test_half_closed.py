"""Clients that shut the sending half of their connection behind a request, and those that leave altogether:
TCP tells the router the same of both.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.support.router.harness import CHAT, Connection, chat_body, disagg
from tests.support.router.mock_worker import ANSWER, EVENTS, STREAM, Gate, hang, stream

HEALTH = b"GET /health HTTP/1.1\r\nhost: t\r\n\r\n"
AT_MOST_S = 2.0
"""A second, and what this machine takes."""


def request(version: str = "1.1", **more: object) -> bytes:
    body = json.dumps(chat_body(**more)).encode()
    return f"POST {CHAT} HTTP/{version}\r\nhost: t\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def final(client: Connection) -> int:
    """The status of the answer behind any interim ones, whose body is left to be read."""
    while (head := await client.head()).status == 100:
        pass
    assert "close" in head.headers.get("connection", "close")
    return head.status


@pytest.mark.parametrize("ordinary_first", [False, True])
async def test_who_sends_no_more_gets_all_answers_and_then_the_connection_ends(ordinary_first: bool) -> None:
    async with disagg() as (harness, _, _):
        client = await harness.connect()
        client.writer.write((HEALTH if ordinary_first else b"") + request())
        client.writer.write_eof()
        said = await client.reader.read()
        assert said.endswith(ANSWER)
        assert said.count(b"HTTP/1.1 200 OK") == 1 + ordinary_first
        assert harness.stats.client_aborts == {}


async def test_an_answer_that_takes_its_time_comes_too() -> None:
    async with disagg(prefill=0) as (harness, _, [decode]):
        gate = Gate()
        decode.script(CHAT, stream(EVENTS, gate, -1))
        client = await harness.connect()
        client.writer.write(request(stream=True))
        client.writer.write_eof()
        await gate.reached.wait()
        await asyncio.sleep(0.2)  # a few looks at the connection
        gate.open.set()
        assert await final(client) == 200
        body = b""
        while chunk := await client.chunk():
            body += chunk
        assert body == STREAM
        assert await client.reader.read() == b""


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_who_has_left_is_noticed_within_a_second(streams: bool, version: str) -> None:
    async with disagg(prefill=0) as (harness, _, [decode]):
        gate = Gate()
        decode.script(CHAT, stream(EVENTS, gate, 1) if streams else hang(gate))
        client = await harness.connect()
        client.writer.write(request(version, stream=streams))
        await gate.reached.wait()
        if streams:
            await client.head()
        client.leave()
        async with asyncio.timeout(AT_MOST_S):
            await decode.wait_until(lambda: decode.disconnected == 1)
        await harness.assert_nothing_leaked()
        assert sum(harness.stats.client_aborts.values()) == 1


async def test_half_a_request_and_no_more_is_a_client_that_has_left() -> None:
    async with disagg() as (harness, [prefill], _):
        client = await harness.connect()
        client.writer.write(request()[:-3])
        client.writer.write_eof()
        assert await client.reader.read() == b""
        assert prefill.requests == []
