"""The connection pool against peers that are slow, chunked, closing, or no HTTP servers at all."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from pdserve.router.config.limits import Limits
from pdserve.router.fleet.worker import Worker
from pdserve.router.http import worker_connection as pool_module
from pdserve.router.http.deadlines import TICK_S, Deadlines
from pdserve.router.http.tls import UpstreamError
from pdserve.router.http.worker_connection import (
    MAX_HEAD_BYTES,
    NOT_PASSED_ON,
    Fetched,
    Upstream,
    Waiter,
    WorkerConnection,
)
from pdserve.router.native.heads import joined
from tests.support.router import mock_worker as mock
from tests.support.router.mock_worker import CloseConnection, Gate, MockWorker, Received, Script, Wire
from tests.support.virtual_time import virtually

LIMIT_BYTES = 1 << 30
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
FINE = mock.raw_answer(OK)


class Client:
    """A client of one worker."""

    def __init__(self, worker: MockWorker, limits: Limits) -> None:
        self.mock = worker
        self.worker = Worker("decode", worker.url)
        self.upstream = Upstream(limits)

    async def ask(self, body: bytes = b"{}", limit_s: float = 5.0, limit_bytes: int = LIMIT_BYTES) -> Fetched:
        return await self.upstream.fetch(
            self.worker, "/x", b"x-a: b\r\n", body, limit_s=limit_s, limit_bytes=limit_bytes
        )

    async def read(self, body: bytes = b"{}") -> bytes:
        return (await self.ask(body)).body

    async def relay(
        self, sink: Callable[[WorkerConnection], None], limit_s: float = 5.0
    ) -> tuple[WorkerConnection, bytes]:
        """The connection of an answer that goes to the sink as it comes, and what the sink has not taken."""
        up = await self.upstream.exchange(
            Waiter(), self.worker, b"/x", b"", b"{}", limit_s=limit_s, sink=sink
        )
        up.read_head()
        return up, up.take()

    async def fails(self) -> str:
        """How an answer is told to be broken."""
        with pytest.raises(UpstreamError) as caught:
            await self.read()
        return caught.value.kind


@asynccontextmanager
async def client_of(*scripts: Script, limits: Limits | None = None) -> AsyncIterator[Client]:
    """A client of a worker that answers so, one script after another."""
    worker = MockWorker("decode")
    worker.script("/x", *scripts)
    async with mock.workers(worker):
        client = Client(worker, limits or Limits())
        try:
            yield client
            assert len(client.upstream.deadlines) == 0
            assert client.upstream.open_count == client.upstream.idle_count
        finally:
            client.upstream.close()


async def test_a_trailer_of_a_worker_is_no_header() -> None:
    trailer = mock.raw_answer(CHUNKED + b"2\r\nok\r\n0\r\nx-pdserve-cached: device=9\r\nx-b: c\r\n\r\n")
    async with client_of(trailer, FINE) as client:
        up, body = await client.relay(lambda _: None)
        assert (body, joined(up.pairs, NOT_PASSED_ON), b"x-pdserve-cached" in up.said) == (b"ok", b"", False)
        assert await client.read() == b"ok"
        assert client.mock.connections == 1


async def test_a_connection_is_used_again() -> None:
    async with client_of(FINE, FINE, FINE) as client:
        assert [await client.read(b"%d" % i) for i in range(3)] == [b"ok"] * 3
        assert client.mock.connections == 1
        assert [r.body for r in client.mock.got("/x")] == [b"0", b"1", b"2"]
        assert client.mock.requests[0].headers == {"host": client.mock.id, "content-length": "1", "x-a": "b"}
        assert (client.upstream.counts.opened, client.upstream.counts.reused) == (1, 2)


@pytest.mark.parametrize("size", [0, 1, 65536, 3 * 256 * 1024])
async def test_large_bodies_both_ways_arrive_unchanged(size: int) -> None:
    async def echo(wire: Wire, request: Received) -> None:
        await wire.body(200, request.body)

    data = (bytes(range(256)) * (size // 256 + 1))[:size]
    async with client_of(echo, echo) as client:
        assert [await client.read(data) for _ in range(2)] == [data, data]
        assert client.mock.connections == 1


@pytest.mark.parametrize("seed", range(8))
async def test_what_a_sink_takes_as_it_comes_and_what_it_leaves_make_up_the_body_in_order(seed: int) -> None:
    dice = random.Random(seed)
    pieces = [dice.randbytes(dice.randrange(1, 5000)) for _ in range(60)]

    async def script(wire: Wire, request: Received) -> None:
        await wire.head(200, "text/event-stream")
        for piece in pieces:
            await wire.chunk(piece)
            if dice.random() < 0.7:
                await asyncio.sleep(0)
        await wire.end()

    async with client_of(script) as client:
        got, taken = b"", 0

        def take(up: WorkerConnection) -> None:
            nonlocal got, taken
            if dice.random() < 0.2:
                up.pause()
                asyncio.get_running_loop().call_soon(up.go_on, 5.0)
                return
            got += up.take()
            taken += 1

        up, rest = await client.relay(take)
        assert up.is_stream
        assert got + rest == b"".join(pieces)
        assert taken


@pytest.mark.parametrize(("breaks", "kind"), [(True, "cut"), (False, "timeout")])
async def test_a_sink_says_how_long_the_next_piece_may_take_and_an_end_is_told(
    breaks: bool, kind: str
) -> None:
    gate = Gate()

    async def script(wire: Wire, request: Received) -> None:
        await wire.head(200, "text/event-stream")
        for _ in range(6):
            await wire.chunk(b"x")
            await asyncio.sleep(0.02)
        if breaks:
            raise CloseConnection
        await gate.passed()

    async with client_of(script) as client:
        got = b""

        def take(up: WorkerConnection) -> None:
            nonlocal got
            got += up.take()
            up.deadline_s = asyncio.get_running_loop().time() + 0.3

        with pytest.raises(UpstreamError) as caught:
            await client.relay(take)
        assert (got, caught.value.kind, caught.value.rest) == (b"xxxxxx", kind, b"")
        gate.open.set()


async def test_what_nobody_has_taken_of_a_broken_answer_is_told() -> None:
    async with client_of(mock.close(after=CHUNKED + b"5\r\nhello\r\n")) as client:
        with pytest.raises(UpstreamError) as caught:
            await client.relay(lambda _: None)
        assert (caught.value.kind, caught.value.rest, caught.value.is_young) == ("cut", b"hello", False)


async def test_an_answer_that_is_too_long_is_an_error() -> None:
    endless = mock.raw_answer(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 200_000)
    async with client_of(endless) as client:
        with pytest.raises(UpstreamError) as caught:
            await client.ask(limit_bytes=1000)
        assert caught.value.kind == "protocol"


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (b"", "closed"),
        (b"HTTP/1.1 20", "closed"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort", "cut"),
        (CHUNKED + b"5\r\nhello\r\n", "cut"),
        (b"\x16\x03\x01\x00\x00garbage that is no HTTP\r\n\r\n", "protocol"),
        (CHUNKED + b"zz\r\nhello\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * (MAX_HEAD_BYTES + 1), "protocol"),
    ],
)
async def test_a_broken_answer_is_an_error_and_its_connection_is_cut(sent: bytes, kind: str) -> None:
    async with client_of(mock.close(after=sent), FINE) as client:
        assert await client.fails() == kind
        assert client.upstream.open_count == 0
        assert len(client.mock.got("/x")) == 1  # a connection that is new is not replaced


async def test_a_body_without_length_ends_with_the_connection() -> None:
    async with client_of(mock.close(after=b"HTTP/1.1 200 OK\r\n\r\nhello")) as client:
        assert await client.read() == b"hello"
        assert client.upstream.open_count == 0


async def test_a_body_without_length_is_cut_short_by_a_reset() -> None:
    gate = Gate()

    async def reset(wire: Wire, request: Received) -> None:
        await wire.raw(b"HTTP/1.1 200 OK\r\n\r\nhel")
        await gate.passed()
        at_once = struct.pack("ii", 1, 0)
        wire.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        raise CloseConnection

    async with client_of(reset) as client:
        got = b""

        def take(up: WorkerConnection) -> None:
            nonlocal got
            got += up.take()
            gate.open.set()

        with pytest.raises(UpstreamError) as caught:
            await client.relay(take)
        assert (got, caught.value.kind) == (b"hel", "cut")


@pytest.mark.parametrize("last", [OK.replace(b"200 OK\r\n", b"200 OK\r\nconnection: close\r\n"), OK + OK])
async def test_a_connection_that_closes_or_answers_twice_is_not_used_again(last: bytes) -> None:
    async with client_of(mock.raw_answer(last), FINE) as client:
        assert [await client.read() for _ in range(2)] == [b"ok", b"ok"]
        assert client.mock.connections == 2


async def test_an_interim_answer_is_passed_over() -> None:
    async with client_of(mock.raw_answer(b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\n" + OK), FINE) as client:
        up, body = await client.relay(lambda _: None)
        assert (up.status, joined(up.pairs, NOT_PASSED_ON), body) == (200, b"", b"ok")
        assert await client.read() == b"ok"


async def test_a_stale_connection_is_replaced_once() -> None:
    async with client_of(FINE, mock.close(), FINE, FINE, mock.close(), mock.close()) as client:
        assert [await client.read() for _ in range(2)] == [b"ok", b"ok"]
        assert client.upstream.counts.stale == 1
        assert await client.read() == b"ok"
        assert await client.fails() == "closed"
        assert client.upstream.counts.stale == 2


async def test_an_idle_connection_is_dropped_before_the_worker_would(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool_module.IDLE_S < 5.0
    async with client_of(FINE, FINE) as client:
        await client.read()
        monkeypatch.setattr(pool_module, "IDLE_S", 0.0)
        await client.read()
        assert (client.mock.connections, client.upstream.counts.reused) == (2, 0)
        assert client.upstream.pool(client.worker).take_idle(asyncio.get_running_loop().time()) is None
        assert client.upstream.open_count == 0


async def test_silence_before_the_head_or_in_the_body_times_out_and_is_cut() -> None:
    async with client_of(mock.hang(), mock.stream([b"one", b"two"], Gate(), gate_after=1)) as client:
        for count in (1, 2):
            with pytest.raises(UpstreamError) as caught:
                await client.ask(limit_s=0.2)
            assert caught.value.kind == "timeout"
            await client.mock.wait_until(lambda: client.mock.disconnected == count)  # noqa: B023
        assert caught.value.rest == b"one"


async def test_cancelling_at_any_point_leaves_nothing_open() -> None:
    async with client_of() as client:
        for turns in range(12):
            client.mock.scripts.clear()
            client.mock.script("/x", mock.hang())
            task = asyncio.create_task(client.ask())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert client.upstream.open_count == client.upstream.idle_count == 0
            assert len(client.upstream.deadlines) == 0


async def test_a_slow_reader_stops_the_worker_from_sending() -> None:
    total, sent = 64 * 1024 * 1024, 0

    async def flood(wire: Wire, request: Received) -> None:
        nonlocal sent
        piece = b"x" * 65536
        await wire.head(200, "text/plain", total)
        while sent < total:
            await wire.raw(piece)
            sent += len(piece)

    async with client_of(flood) as client:
        got = 0
        ups: list[WorkerConnection] = []

        def take(up: WorkerConnection) -> None:
            nonlocal got
            if not ups:
                ups.append(up)
                up.pause()
            else:
                got += len(up.take())

        relaying = asyncio.create_task(client.relay(take))
        before = -1
        while sent != before or not ups:  # until the sender is stuck
            before = sent
            for _ in range(100):
                await asyncio.sleep(0)
        assert sent < total
        ups[0].go_on(5.0)
        _, rest = await relaying
        assert got + len(rest) == total


async def test_cutting_a_worker_fails_what_is_in_flight() -> None:
    gate = Gate()
    async with client_of(mock.hang(gate)) as client:
        failing = asyncio.create_task(client.fails())
        await gate.reached.wait()
        client.upstream.cut_worker(client.worker)
        assert await failing == "down"


@virtually
async def test_the_time_by_which_deadlines_are_set_is_at_most_a_tick_old() -> None:
    deadlines = Deadlines(asyncio.get_running_loop())
    for _ in range(9):
        await asyncio.sleep(0.7 * TICK_S)
        assert 0 <= deadlines.loop.time() - deadlines.now_s <= 1.01 * TICK_S
    deadlines.close()
