"""The client leaves, in every phase: what was under way for it is cut at once and nothing is left over."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pdserve.router.config.limits import Deadlines
from tests.support.router.harness import CHAT, Connection, Harness, chat_body, disagg
from tests.support.router.mock_worker import ANSWER, EVENTS, Gate, hang, stream

PATIENT = Deadlines(settle_s=100.0, prefill_s=100.0, total_s=200.0)
"""A worker that is hung up on within the test was hung up on for the client that left."""


async def ask_with_a_large_body(harness: Harness) -> Connection:
    client, body = await harness.connect(), json.dumps(chat_body(padding="x" * 200_000)).encode()
    await client.send(CHAT, b"", {"content-length": str(len(body))})
    await harness.until_in_flight()
    client.writer.write(body)
    return client


async def ask_and_ask_again(harness: Harness, target: str = CHAT) -> Connection:
    """Two more requests lie behind the one that is answered."""
    client = await harness.asking()
    for _ in range(2):
        await client.send(target, json.dumps(chat_body(padding="x" * 20_000)).encode())
    return client


async def ask_a_second_time(harness: Harness) -> Connection:
    client = await harness.connect()
    await client.send("/tokenize", json.dumps(chat_body()).encode())
    assert (await client.response()).status == 200
    await client.send(CHAT, json.dumps(chat_body()).encode())
    return client


@pytest.mark.parametrize(
    "ask",
    [
        Harness.asking,
        ask_with_a_large_body,
        ask_a_second_time,
        ask_and_ask_again,
        functools.partial(ask_and_ask_again, target=CHAT + "?by=asgi"),
        functools.partial(ask_and_ask_again, target="/health"),
    ],
    ids=["simply", "large body", "second request", "direct behind", "asgi behind", "ordinary behind"],
)
async def test_who_leaves_during_prefill_ends_it_and_asks_no_decode_worker(
    ask: Callable[[Harness], Awaitable[Connection]],
) -> None:
    async with disagg(deadlines=PATIENT) as (harness, [prefill], [decode]):
        gate = Gate()
        prefill.script("/pd/prefill", hang(gate))
        client = await ask(harness)
        await gate.reached.wait()
        client.leave()
        await prefill.wait_until(lambda: prefill.disconnected == 1)
        await harness.assert_nothing_leaked()
        assert decode.got(CHAT) == []
        assert harness.stats.client_aborts == {"prefill": 1}


async def test_leaving_while_still_sending_the_body() -> None:
    async with disagg() as (harness, [prefill], _):
        client = await harness.connect()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: t\r\ncontent-length: 99\r\n\r\n{{"
        client.writer.write(head.encode())
        await client.writer.drain()
        await harness.until_in_flight()
        client.leave()
        await harness.assert_nothing_leaked()
        assert prefill.requests == []
        assert harness.stats.client_aborts == {"body": 1}


async def test_a_client_that_does_not_read_holds_up_only_itself() -> None:
    async with disagg() as (harness, _, [decode]):
        sent = 0

        async def flood(wire, request) -> None:  # type: ignore[no-untyped-def]
            nonlocal sent
            await wire.head(200, "text/event-stream")
            while True:
                await wire.chunk(b"data: " + b"x" * 65536 + b"\n\n")
                sent += 1

        decode.script(CHAT, flood)
        client = await harness.asking(stream=True)
        await client.head()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        before = -1
        while before != sent < 1000:  # until back-pressure has reached the worker
            before = sent
            for _ in range(100):
                await asyncio.sleep(0)
        assert sent < 1000  # what sockets and buffers hold: 10 MB
        assert (await harness.chat()).status == 200
        client.leave()
        await decode.wait_until(lambda: decode.disconnected == 1)
        await harness.assert_nothing_leaked()


async def test_a_client_that_reads_by_fits_gets_every_byte_in_order() -> None:
    async with disagg() as (harness, _, [decode]):
        events = [b"data: %d" % number + b"x" * 8192 + b"\n\n" for number in range(1500)]
        decode.script(CHAT, stream(events))
        client = await harness.connect()
        transport: Any = client.writer.transport
        await client.send(CHAT, json.dumps(chat_body(stream=True)).encode())
        answer = asyncio.ensure_future(client.response())
        for number in range(40):
            (transport.resume_reading if number % 2 else transport.pause_reading)()
            for _ in range(50):
                await asyncio.sleep(0)
        assert (await asyncio.wait_for(answer, 30)).body == b"".join(events)


async def test_a_client_that_pipelines_far_ahead_is_held_up_and_loses_nothing() -> None:
    async with disagg(prefill=0) as (harness, _, [decode]):
        gate = Gate()
        decode.script(CHAT, stream(EVENTS, gate, 1))
        client = await harness.asking(stream=True)
        await gate.reached.wait()
        count, body = 40, json.dumps(chat_body(padding="x" * 500_000)).encode()
        sending = asyncio.gather(*(client.send(CHAT, body) for _ in range(count)))
        transport, before = client.writer.transport, -1
        while before != transport.get_write_buffer_size():  # until nothing more is taken
            before = transport.get_write_buffer_size()
            for _ in range(100):
                await asyncio.sleep(0)
        assert before > 0
        gate.open.set()
        assert (await client.response()).body == b"".join(EVENTS)
        for _ in range(count):
            assert (await client.response()).body == ANSWER
        await sending


async def test_a_kept_connection_serves_one_request_after_another() -> None:
    async with disagg() as (harness, _, _):
        client = await harness.connect()
        for i in range(5):
            await client.send(CHAT, json.dumps(chat_body(stream=bool(i % 2))).encode())
            assert (await client.response()).status == 200
