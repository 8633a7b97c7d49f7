"""The connection pool against peers that are slow, chunked, closing, or no HTTP servers at all."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdserve.router.config.limits import Limits
from pdserve.router.fleet.worker import Worker
from pdserve.router.upstream import pool as pool_module
from pdserve.router.upstream.client import Upstream
from pdserve.router.upstream.connection import MAX_HEAD_BYTES
from pdserve.router.upstream.response import HIGH_WATER_BYTES, Response, UpstreamError
from tests.support.router.harness import run
from tests.support.router.mock_worker import (
    CloseConnection,
    Gate,
    MockWorker,
    Received,
    Wire,
    close,
    hang,
    raw_answer,
    stream,
    workers,
)

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Client:
    def __init__(self, worker: Worker, upstream: Upstream) -> None:
        self.worker = worker
        self.upstream = upstream

    async def post(self, body: bytes = b"{}", head_s: float = 5.0) -> Response:
        return await self.upstream.post(self.worker, "/x", b"x-a: b\r\n", body, connect_s=2.0, head_s=head_s)

    async def read(self, body: bytes = b"{}") -> bytes:
        response = await self.post(body)
        try:
            return await response.read_all(5.0, 1 << 30)
        finally:
            response.release()


@asynccontextmanager
async def client_of(mock: MockWorker, limits: Limits | None = None) -> AsyncIterator[Client]:
    async with workers(mock):
        upstream = Upstream(limits or Limits())
        try:
            yield Client(Worker("decode", mock.url), upstream)
            assert len(upstream.deadlines) == 0
            assert upstream.open_count == upstream.idle_count
        finally:
            upstream.close()


def test_a_connection_is_used_again() -> None:
    async def main() -> None:
        mock = MockWorker("decode")
        mock.script("/x", *[raw_answer(OK)] * 3)
        async with client_of(mock) as client:
            assert [await client.read(b"%d" % i) for i in range(3)] == [b"ok"] * 3
            assert mock.connections == 1
            assert [r.body for r in mock.got("/x")] == [b"0", b"1", b"2"]
            assert mock.requests[0].headers == {
                "host": mock.id,
                "content-length": "1",
                "x-a": "b",
            }
            assert client.upstream.counts.opened == 1
            assert client.upstream.counts.reused == 2

    run(main())


@pytest.mark.parametrize("size", [0, 1, 65536, 3 * HIGH_WATER_BYTES])
def test_large_bodies_both_ways_arrive_unchanged(size: int) -> None:
    async def main() -> None:
        data = bytes(range(256)) * (size // 256 + 1)

        async def echo(wire: Wire, request: Received) -> None:
            await wire.body(200, request.body)

        mock = MockWorker("decode")
        mock.script("/x", echo, echo)
        async with client_of(mock) as client:
            assert await client.read(data[:size]) == data[:size]
            assert await client.read(data[:size]) == data[:size]
            assert mock.connections == 1

    run(main())


def test_an_answer_in_single_bytes_is_understood() -> None:
    async def main() -> None:
        async def drip(wire: Wire, request: Received) -> None:
            text = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
            for i in range(len(text)):
                await wire.raw(text[i : i + 1])
                await asyncio.sleep(0)

        mock = MockWorker("decode")
        mock.script("/x", drip)
        async with client_of(mock) as client:
            assert await client.read() == b"abcde"

    run(main())


def test_chunks_are_handed_on_as_they_come() -> None:
    async def main() -> None:
        gate = Gate()
        mock = MockWorker("decode")
        mock.script("/x", stream([b"one", b"two"], gate, gate_after=1))
        async with client_of(mock) as client:
            response = await client.post()
            assert await response.read_some(5) == b"one"
            assert not response.complete
            gate.open.set()
            assert await response.read_some(5) == b"two"
            assert await response.read_some(5) == b""
            response.release()

    run(main())


@pytest.mark.parametrize("seed", range(8))
def test_what_is_given_as_it_comes_and_what_is_declined_make_up_the_body_in_order(seed: int) -> None:
    async def main() -> None:
        dice = random.Random(seed)
        pieces = [dice.randbytes(dice.randrange(1, 5000)) for _ in range(60)]

        async def script(wire: Wire, request: Received) -> None:
            await wire.head(200, "text/event-stream")
            for piece in pieces:
                await wire.chunk(piece)
                if dice.random() < 0.7:
                    await asyncio.sleep(0)
            await wire.end()

        mock = MockWorker("decode")
        mock.script("/x", script)
        async with client_of(mock) as client:
            response = await client.post()
            got, given = b"", 0

            def take(data: bytes) -> bool:
                nonlocal got, given
                if dice.random() < 0.2:
                    return False
                got += data
                given += 1
                return True

            while not response.at_end:
                data = await response.give(take, 5)
                got += data
            response.release()
            assert got == b"".join(pieces)
            assert given

    run(main())


@pytest.mark.parametrize("breaks", [True, False])
def test_what_is_given_starts_the_wait_anew_and_an_end_is_told(breaks: bool) -> None:
    async def main() -> None:
        gate = Gate()

        async def script(wire: Wire, request: Received) -> None:
            await wire.head(200, "text/event-stream")
            for _ in range(6):
                await wire.chunk(b"x")
                await asyncio.sleep(0.02)
            if breaks:
                raise CloseConnection
            await gate.passed()

        mock = MockWorker("decode")
        mock.script("/x", script)
        async with client_of(mock) as client:
            response = await client.post()
            got: list[bytes] = []
            deadlines_s: list[float] = []

            def take(data: bytes) -> bool:
                got.append(data)
                deadlines_s.append(response.deadline_s)
                return True

            async def to_the_end() -> None:
                while True:
                    got.append(await response.give(take, 0.5))

            with pytest.raises(UpstreamError) as caught:
                await to_the_end()
            assert b"".join(got) == b"xxxxxx"
            assert deadlines_s == sorted(deadlines_s)
            assert deadlines_s[0] < deadlines_s[-1]
            assert caught.value.kind == ("cut" if breaks else "timeout")
            response.release()
            gate.open.set()

    run(main())


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (b"", "closed"),
        (b"HTTP/1.1 20", "closed"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort", "cut"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n", "cut"),
        (b"\x16\x03\x01\x00\x00garbage that is no HTTP\r\n\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nhello\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * (MAX_HEAD_BYTES + 1), "protocol"),
    ],
)
def test_a_broken_answer_is_an_error_and_its_connection_is_cut(sent: bytes, kind: str) -> None:
    async def main() -> None:
        mock = MockWorker("decode")
        mock.script("/x", close(after=sent))
        async with client_of(mock) as client:
            with pytest.raises(UpstreamError) as caught:
                await client.read()
            assert caught.value.kind == kind
            assert client.upstream.open_count == 0

    run(main())


def test_what_came_before_the_break_can_still_be_read() -> None:
    async def main() -> None:
        mock = MockWorker("decode")
        mock.script("/x", close(after=b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort"))
        async with client_of(mock) as client:
            response = await client.post()
            assert await response.read_some(5) == b"short"
            with pytest.raises(UpstreamError):
                await response.read_some(5)
            response.release()

    run(main())


def test_a_body_without_length_ends_with_the_connection() -> None:
    async def main() -> None:
        mock = MockWorker("decode")
        mock.script("/x", close(after=b"HTTP/1.1 200 OK\r\n\r\nhello"))
        async with client_of(mock) as client:
            assert await client.read() == b"hello"
            assert client.upstream.open_count == 0

    run(main())


def test_a_body_without_length_is_cut_short_by_a_reset() -> None:
    async def main() -> None:
        gate = Gate()

        async def reset(wire: Wire, request: Received) -> None:
            await wire.raw(b"HTTP/1.1 200 OK\r\n\r\nhel")
            await gate.passed()
            at_once = struct.pack("ii", 1, 0)
            wire.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            raise CloseConnection

        mock = MockWorker("decode")
        mock.script("/x", reset)
        async with client_of(mock) as client:
            response = await client.post()
            assert await response.read_some(5.0) == b"hel"
            gate.open.set()
            with pytest.raises(UpstreamError) as caught:
                await response.read_some(5.0)
            assert caught.value.kind == "cut"
            response.release()

    run(main())


def test_connection_close_is_heeded() -> None:
    async def main() -> None:
        mock = MockWorker("decode")
        closing = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"
        mock.script("/x", raw_answer(closing), raw_answer(OK))
        async with client_of(mock) as client:
            assert await client.read() == b"ok"
            assert await client.read() == b"ok"
            assert mock.connections == 2

    run(main())


def test_an_interim_answer_is_passed_over() -> None:
    async def main() -> None:
        mock = MockWorker("decode")
        mock.script("/x", raw_answer(b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\n" + OK), raw_answer(OK))
        async with client_of(mock) as client:
            response = await client.post()
            assert response.status == 200
            assert response.headers == [(b"content-length", b"2")]
            assert await response.read_all(5, 100) == b"ok"
            response.release()
            assert await client.read() == b"ok"

    run(main())


def test_two_answers_to_one_request_end_the_connection() -> None:
    async def main() -> None:
        mock = MockWorker("decode")
        mock.script("/x", raw_answer(OK + OK), raw_answer(OK))
        async with client_of(mock) as client:
            assert await client.read() == b"ok"
            assert await client.read() == b"ok"
            assert mock.connections == 2

    run(main())


def test_a_stale_connection_is_replaced_once() -> None:
    async def main() -> None:
        mock = MockWorker("decode")
        mock.script("/x", raw_answer(OK), close(), raw_answer(OK), raw_answer(OK), close(), close())
        async with client_of(mock) as client:
            assert await client.read() == b"ok"
            assert await client.read() == b"ok"
            assert client.upstream.counts.stale == 1
            assert await client.read() == b"ok"
            with pytest.raises(UpstreamError):
                await client.read()
            assert client.upstream.counts.stale == 2

    run(main())


def test_a_fresh_connection_that_closes_is_not_tried_again() -> None:
    async def main() -> None:
        mock = MockWorker("decode")
        mock.script("/x", close(), raw_answer(OK))
        async with client_of(mock) as client:
            with pytest.raises(UpstreamError):
                await client.read()
            assert len(mock.got("/x")) == 1

    run(main())


def test_an_idle_connection_is_dropped_before_the_worker_would(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        mock = MockWorker("decode")
        mock.script("/x", raw_answer(OK), raw_answer(OK))
        async with client_of(mock) as client:
            await client.read()
            monkeypatch.setattr(pool_module, "IDLE_S", 0.0)
            assert client.upstream.pool(client.worker).take_idle(asyncio.get_running_loop().time()) is None
            assert client.upstream.open_count == 0

    assert pool_module.IDLE_S < 5.0
    run(main())


def test_a_silent_worker_times_out_and_is_cut() -> None:
    async def main() -> None:
        gate = Gate()
        mock = MockWorker("decode")
        mock.script("/x", hang(gate))
        async with client_of(mock) as client:
            with pytest.raises(UpstreamError) as caught:
                await client.post(head_s=0.05)
            assert caught.value.kind == "timeout"
            await mock.wait_until(lambda: mock.disconnected == 1)

    run(main())


def test_a_gap_in_the_body_times_out() -> None:
    async def main() -> None:
        mock = MockWorker("decode")
        mock.script("/x", stream([b"one", b"two"], Gate(), gate_after=1))
        async with client_of(mock) as client:
            response = await client.post()
            assert await response.read_some(5) == b"one"
            with pytest.raises(UpstreamError) as caught:
                await response.read_some(0.05)
            assert caught.value.kind == "timeout"
            response.release()
            await mock.wait_until(lambda: mock.disconnected == 1)

    run(main())


def test_a_refused_connection_is_said_to_be_that() -> None:
    async def main() -> None:
        mock = MockWorker("decode")
        async with client_of(mock) as client:
            await mock.stop()
            with pytest.raises(UpstreamError) as caught:
                await client.post()
            assert caught.value.kind == "connect"

    run(main())


def test_connections_are_bounded() -> None:
    async def main() -> None:
        gate = Gate()
        mock = MockWorker("decode")
        mock.script("/x", hang(gate))
        async with client_of(mock, Limits(worker_connections=1)) as client:
            first = asyncio.create_task(client.post())
            await gate.reached.wait()
            with pytest.raises(UpstreamError) as caught:
                await client.post()
            assert caught.value.kind == "busy"
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    run(main())


def test_cancelling_at_any_point_leaves_nothing_open() -> None:
    async def main() -> None:
        mock = MockWorker("decode")
        async with client_of(mock) as client:
            for turns in range(12):
                mock.scripts.clear()
                mock.script("/x", hang(Gate()))
                task = asyncio.create_task(client.post())
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert client.upstream.open_count == client.upstream.idle_count == 0
                assert len(client.upstream.deadlines) == 0

    run(main())


def test_a_slow_reader_stops_the_worker_from_sending() -> None:
    async def main() -> None:
        total = 64 * 1024 * 1024
        sent = 0

        async def flood(wire: Wire, request: Received) -> None:
            nonlocal sent
            piece = b"x" * 65536
            await wire.head(200, "text/plain", total)
            while sent < total:
                await wire.raw(piece)
                sent += len(piece)

        mock = MockWorker("decode")
        mock.script("/x", flood)
        async with client_of(mock) as client:
            response = await client.post()
            before = -1
            while sent != before:  # until the sender is stuck
                before = sent
                for _ in range(100):
                    await asyncio.sleep(0)
            assert sent < total
            assert len(await response.read_all(5, total)) == total
            response.release()

    run(main())


def test_cutting_a_worker_fails_what_is_in_flight() -> None:
    async def main() -> None:
        gate = Gate()
        mock = MockWorker("decode")
        mock.script("/x", hang(gate))
        async with client_of(mock) as client:
            task = asyncio.create_task(client.post())
            await gate.reached.wait()
            client.upstream.cut_worker(client.worker)
            with pytest.raises(UpstreamError) as caught:
                await task
            assert caught.value.kind == "down"

    run(main())
