"""The client leaves, in every phase: what was under way for it is cut at once and nothing is left over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from pdserve.router.config.limits import Deadlines
from tests.support.router.harness import Connection, chat_body, disagg, run
from tests.support.router.mock_worker import ANSWER, EVENTS, Gate, hang, stream

CHAT = "/v1/chat/completions"
PATIENT = Deadlines(settle_s=100.0, prefill_s=100.0, total_s=200.0)
"""A worker that is hung up on within the test was hung up on for the client that left."""


def test_leaving_after_a_large_body() -> None:
    async def main() -> None:
        async with disagg() as (harness, [prefill], _):
            gate = Gate()
            prefill.script("/pd/prefill", hang(gate))
            client = await harness.connect()
            body = json.dumps(chat_body(padding="x" * 200_000)).encode()
            length = {"content-length": str(len(body))}
            await client.send(CHAT, b"", length)
            await harness.until_in_flight()
            client.writer.write(body)
            await gate.reached.wait()
            client.leave()
            await prefill.wait_until(lambda: prefill.disconnected == 1)
            await harness.assert_nothing_leaked()

    run(main())


def test_leaving_during_the_second_request_of_a_connection() -> None:
    async def main() -> None:
        async with disagg() as (harness, [prefill], _):
            client = await harness.connect()
            body = json.dumps(chat_body()).encode()
            await client.send(CHAT, body)
            assert (await client.response()).status == 200
            gate = Gate()
            prefill.script("/pd/prefill", hang(gate))
            await client.send(CHAT, body)
            await gate.reached.wait()
            client.leave()
            await prefill.wait_until(lambda: prefill.disconnected == 1)
            await harness.assert_nothing_leaked()
            assert harness.stats.client_aborts == {"prefill": 1}

    run(main())


@pytest.mark.parametrize("target", [CHAT, CHAT + "?by=asgi", "/health"])
def test_leaving_with_a_request_pipelined_behind(target: str) -> None:
    async def main() -> None:
        async with disagg(deadlines=PATIENT) as (harness, [prefill], [decode]):
            client = await harness.connect()
            gate = Gate()
            prefill.script("/pd/prefill", hang(gate))
            body = json.dumps(chat_body(padding="x" * 20_000)).encode()
            await client.send(CHAT, body)
            await gate.reached.wait()
            for _ in range(2):
                await client.send(target, body)
            client.leave()
            await prefill.wait_until(lambda: prefill.disconnected == 1)
            await harness.assert_nothing_leaked()
            assert decode.requests == []
            assert harness.stats.client_aborts == {"prefill": 1}

    run(main())


def test_leaving_under_a_server_that_only_speaks_asgi() -> None:
    async def main() -> None:
        async with disagg() as (harness, [prefill], _):
            gate, left, sent = Gate(), asyncio.Event(), []
            prefill.script("/pd/prefill", hang(gate))
            messages = [{"type": "http.request", "body": json.dumps(chat_body()).encode()}]

            async def receive() -> dict[str, Any]:
                if messages:
                    return messages.pop()
                await left.wait()
                return {"type": "http.disconnect"}

            async def send(message: MutableMapping[str, Any]) -> None:
                sent.append(message)

            scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b""}
            asking = asyncio.create_task(harness.router(scope, receive, send))
            await gate.reached.wait()
            left.set()
            await asking
            await prefill.wait_until(lambda: prefill.disconnected == 1)
            await harness.assert_nothing_leaked()
            assert sent == []
            assert harness.stats.client_aborts == {"prefill": 1}

    run(main())


def test_leaving_while_still_sending_the_body() -> None:
    async def main() -> None:
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

    run(main())


def test_a_client_that_does_not_read_holds_up_only_itself() -> None:
    async def main() -> None:
        async with disagg() as (harness, _, [decode]):
            sent = 0

            async def flood(wire, request) -> None:  # type: ignore[no-untyped-def]
                nonlocal sent
                await wire.head(200, "text/event-stream")
                while True:
                    await wire.chunk(b"data: " + b"x" * 65536 + b"\n\n")
                    sent += 1

            decode.script(CHAT, flood)
            client = await harness.connect()
            await client.send(CHAT, json.dumps(chat_body(stream=True)).encode())
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

    run(main())


def test_a_client_that_reads_by_fits_gets_every_byte_in_order() -> None:
    async def main() -> None:
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
            client.leave()

    run(main())


def test_a_client_that_pipelines_far_ahead_is_held_up_and_loses_nothing() -> None:
    async def main() -> None:
        async with disagg(prefill=0) as (harness, _, [decode]):
            gate = Gate()
            decode.script(CHAT, stream(EVENTS, gate, 1))
            client = await harness.connect()
            await client.send(CHAT, json.dumps(chat_body(stream=True)).encode())
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
            client.leave()

    run(main())


def test_a_kept_connection_serves_one_request_after_another() -> None:
    async def main() -> None:
        async with disagg() as (harness, _, _):
            client: Connection = await harness.connect()
            for i in range(5):
                await client.send(CHAT, json.dumps(chat_body(stream=bool(i % 2))).encode())
                assert (await client.response()).status == 200
            client.leave()

    run(main())
