"""Clients whose body is slow, and what a client that still sends gets to read.."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from pdserve.router.config.limits import Limits
from pdserve.router.server import connection
from tests.support.router.harness import PATIENT, Connection, Harness, chat_body, disagg
from tests.support.router.mock_worker import ANSWER, EVENTS, Gate, MockWorker, Received, Wire, hang

CHAT = "/v1/chat/completions"
BODY = json.dumps(chat_body()).encode()
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


async def test_a_head_without_end_during_an_answer_ends_the_connection_and_is_no_fault_of_the_worker() -> (
    None
):
    async with strict() as (harness, worker):

        async def endless(wire: Wire, request: Received) -> None:
            await wire.head(200, "text/event-stream")
            while True:
                await wire.chunk(EVENTS[0])
                await asyncio.sleep(0.01)

        worker.script(CHAT, endless)
        client = await harness.asking(stream=True)
        assert (await client.head()).status == 200
        client.writer.write(HEAD[:-2] + b"x: " + b"y" * connection.MAX_HEAD_BYTES)
        await worker.wait_until(lambda: worker.disconnected == 1)
        await harness.settle()
        assert harness.stats.client_aborts == {"stream": 1}
        assert harness.stats.stream_errors == {}
        [known] = harness.router.fleet.workers
        assert known.circuit.failures == 0


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
