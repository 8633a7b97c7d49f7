"""Requests of the hot routes on a connection, slow bodies, and clients that send no more."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from pdserve.router.config.limits import Limits
from tests.support.router.harness import CHAT, PATIENT, Connection, Harness, chat_body, disagg
from tests.support.router.mock_worker import ANSWER, EVENTS, STREAM, Gate, MockWorker, hang, stream

BODY = json.dumps(chat_body()).encode()


def request(target: str, *lines: str, body: bytes = BODY, version: str = "1.1") -> bytes:
    head = "".join(f"{line}\r\n" for line in (f"POST {target} HTTP/{version}", "host: test", *lines))
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def test_a_client_that_asks_is_told_to_go_on() -> None:
    async with disagg() as (harness, _, [worker]):
        client = await harness.connect()
        whole = request(CHAT, "expect: 100-continue")
        client.writer.write(whole[: -len(BODY)])
        assert (await client.head()).status == 100
        client.writer.write(BODY)
        assert (await client.response()).body == ANSWER
        assert worker.got(CHAT)[0].body == BODY


@pytest.mark.parametrize("coding", ["length", "chunked"])
async def test_a_long_body_in_pieces_reaches_the_worker_as_it_is(coding: str) -> None:
    long = json.dumps(chat_body(user="u" * 400_000)).encode()
    pieces = [long[at : at + 50_000] for at in range(0, len(long), 50_000)]
    async with disagg(prefill=0) as (harness, _, [worker]):
        client = await harness.connect()
        if coding == "length":
            client.writer.write(request(CHAT, body=long)[: -len(long)])
        else:
            client.writer.write(
                f"POST {CHAT} HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n".encode()
            )
            pieces[:] = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces] + [b"0\r\n\r\n"]
        for piece in pieces:
            client.writer.write(piece)
            await client.writer.drain()
        assert (await client.response()).body == ANSWER
        assert worker.got(CHAT)[0].body == long


async def test_a_trailer_changes_no_header() -> None:
    """A proxy that takes headers away may let trailers through."""
    body = json.dumps(chat_body()).encode()
    async with disagg(prefill=0) as (harness, _, [worker]):
        client = await harness.connect()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: t\r\nx-request-id: mine\r\ntransfer-encoding: chunked\r\n\r\n"
        chunks = b"%x\r\n%b\r\n0\r\nX-Request-Id: others\r\nx-new: 1\r\n\r\n" % (len(body), body)
        for _ in range(2):  # the second on the kept connection
            client.writer.write(head.encode() + chunks)
            answer = await client.response()
            assert (answer.body, answer.headers["x-request-id"]) == (ANSWER, "mine")
        assert [request.headers["x-request-id"] for request in worker.got(CHAT)] == ["mine"] * 2


@pytest.mark.parametrize(("lines", "version"), [(["connection: close"], "1.1"), ([], "1.0")])
async def test_the_connection_ends_with_the_answer_where_the_client_wants_that(
    lines: list[str], version: str
) -> None:
    async with disagg() as (harness, _, _):
        client = await harness.connect()
        client.writer.write(request(CHAT, *lines, version=version))
        answer = await client.response()
        assert (answer.body, answer.headers["connection"]) == (ANSWER, "close")
        assert await client.reader.read() == b""


# --- Clients that shut the sending half of their connection behind a request, and those that leave altoge


HEALTH = b"GET /health HTTP/1.1\r\nhost: t\r\n\r\n"


def chat_request(version: str = "1.1", **more: object) -> bytes:
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
        client.writer.write((HEALTH if ordinary_first else b"") + chat_request())
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
        client.writer.write(chat_request(stream=True))
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


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_who_has_left_is_noticed_within_a_second(version: str) -> None:
    async with disagg(prefill=0) as (harness, _, [decode]):
        gate = Gate()
        decode.script(CHAT, hang(gate))
        client = await harness.connect()
        client.writer.write(chat_request(version))
        await gate.reached.wait()
        client.leave()
        async with asyncio.timeout(2.0):  # a second, and what this machine takes
            await decode.wait_until(lambda: decode.disconnected == 1)
        await harness.assert_nothing_leaked()
        assert sum(harness.stats.client_aborts.values()) == 1


async def test_half_a_request_and_no_more_is_a_client_that_has_left() -> None:
    async with disagg() as (harness, [prefill], _):
        client = await harness.connect()
        client.writer.write(chat_request()[:-3])
        client.writer.write_eof()
        assert await client.reader.read() == b""
        assert prefill.requests == []


# --- Clients whose body is slow, and what a client that still sends gets to read


HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: test\r\ncontent-length: {len(BODY)}\r\n\r\n".encode()
DROP_S = 0.02


@asynccontextmanager
async def strict(head_s: float = 0.3, body_s: float = 0.3) -> AsyncIterator[tuple[Harness, MockWorker]]:
    """A router that gives its clients little time, and its worker."""
    deadlines = msgspec.structs.replace(PATIENT, head_s=head_s, body_s=body_s, total_s=120.0)
    async with disagg(prefill=0, deadlines=deadlines, client_keepalive_s=1.0) as (harness, _, [worker]):
        yield harness, worker


async def drop_by_drop(client: Connection, data: bytes) -> None:
    """Until all is sent, or the router has had enough."""
    for byte in data:
        client.writer.write(bytes([byte]))
        try:
            await client.writer.drain()
        except ConnectionError:
            return
        await asyncio.sleep(DROP_S)


@pytest.mark.parametrize("sent", [BODY, b""])
async def test_a_body_drop_by_drop_or_not_at_all_is_answered_408(sent: bytes) -> None:
    async with strict() as (harness, worker):
        client = await harness.connect()
        client.writer.write(HEAD)
        dropping = asyncio.create_task(drop_by_drop(client, sent))
        answer = await client.response()
        assert answer.status == 408
        assert answer.error["code"] == "body_too_slow"
        assert await client.reader.read() == b""
        dropping.cancel()
        assert worker.got(CHAT) == []


def answered_while_sending(port: int, sent: bytes) -> bytes:
    """What a client reads that has sent this, and sends more when the answer has come, before it reads."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(sent)
        client.recv(1, socket.MSG_PEEK)
        for _ in range(20):
            client.sendall(b"y")
        received = b""
        while data := client.recv(65536):
            received += data
        return received


@pytest.mark.parametrize("sent", [HEAD[:-2], HEAD + BODY[:-5]])
async def test_an_early_answer_is_not_overtaken_by_a_reset(sent: bytes) -> None:
    async with strict() as (harness, _):
        received = await asyncio.to_thread(answered_while_sending, harness.port, sent)
        assert received.startswith(b"HTTP/1.1 408 ")


async def test_a_large_body_has_longer() -> None:
    """Longer than `body_s` in all, but at a rate that is not too slow."""
    async with strict(body_s=0.5) as (harness, _):
        padded = json.dumps(chat_body(user="x" * 100_000)).encode()
        client = await harness.connect()
        client.writer.write(HEAD.replace(b"%d" % len(BODY), b"%d" % len(padded)))
        step = len(padded) // 10
        for at in range(0, len(padded), step):
            client.writer.write(padded[at : at + step])
            await asyncio.sleep(0.1)
        assert (await client.response()).body == ANSWER


async def test_bodies_of_all_requests_together_are_bounded_and_given_back() -> None:
    limits = Limits(held_body_bytes=64 * 1024)
    async with disagg(prefill=0, deadlines=PATIENT, limits=limits) as (harness, _, [worker]):
        gate = Gate()
        worker.script(CHAT, hang(gate))
        messages = [{"role": "user", "content": "x" * 40 * 1024}]
        first = await harness.asking(messages=messages)
        await gate.reached.wait()
        refused = await harness.chat(messages=messages)
        assert (refused.status, refused.error["code"]) == (503, "router_busy")
        assert refused.headers["retry-after"] == "1"
        assert (await harness.chat()).status == 200
        first.leave()
        await harness.settle()
        for _ in range(3):
            assert (await harness.chat(messages=messages)).status == 200
