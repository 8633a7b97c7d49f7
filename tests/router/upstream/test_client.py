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
from pdserve.router.upstream import client as pool_module
from pdserve.router.upstream.client import Upstream
from pdserve.router.upstream.connection import HIGH_WATER_BYTES, MAX_HEAD_BYTES, Response, UpstreamError
from tests.support.router import mock_worker as mock
from tests.support.router.mock_worker import CloseConnection, Gate, MockWorker, Received, Script, Wire

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
FINE = mock.raw_answer(OK)


class Client:
    """A client of one worker."""

    def __init__(self, worker: MockWorker, limits: Limits) -> None:
        self.mock = worker
        self.worker = Worker("decode", worker.url)
        self.upstream = Upstream(limits)

    async def post(self, body: bytes = b"{}", head_s: float = 5.0) -> Response:
        return await self.upstream.ask(self.worker, "/x", b"x-a: b\r\n", body, connect_s=2.0, head_s=head_s)

    async def read(self, body: bytes = b"{}") -> bytes:
        response = await self.post(body)
        try:
            return await response.read_all(5.0, 1 << 30)
        finally:
            response.release()

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
    trailer = mock.raw_answer(CHUNKED + b"2\r\nok\r\n0\r\nx-pdserve-cached: device=9\r\n\r\n")
    async with client_of(trailer, FINE) as client:
        response = await client.post()
        assert await response.read_all(5.0, 1 << 20) == b"ok"
        assert [name for name, _ in response.headers] == [b"transfer-encoding"]
        response.release()
        assert await client.read() == b"ok"
        assert client.mock.connections == 1


async def test_a_connection_is_used_again() -> None:
    async with client_of(FINE, FINE, FINE) as client:
        assert [await client.read(b"%d" % i) for i in range(3)] == [b"ok"] * 3
        assert client.mock.connections == 1
        assert [r.body for r in client.mock.got("/x")] == [b"0", b"1", b"2"]
        assert client.mock.requests[0].headers == {"host": client.mock.id, "content-length": "1", "x-a": "b"}
        assert (client.upstream.counts.opened, client.upstream.counts.reused) == (1, 2)


@pytest.mark.parametrize("size", [0, 1, 65536, 3 * HIGH_WATER_BYTES])
async def test_large_bodies_both_ways_arrive_unchanged(size: int) -> None:
    async def echo(wire: Wire, request: Received) -> None:
        await wire.body(200, request.body)

    data = (bytes(range(256)) * (size // 256 + 1))[:size]
    async with client_of(echo, echo) as client:
        assert [await client.read(data) for _ in range(2)] == [data, data]
        assert client.mock.connections == 1


@pytest.mark.parametrize("seed", range(8))
async def test_what_is_given_as_it_comes_and_what_is_declined_make_up_the_body_in_order(seed: int) -> None:
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


@pytest.mark.parametrize(("breaks", "kind"), [(True, "cut"), (False, "timeout")])
async def test_what_is_given_starts_the_wait_anew_and_an_end_is_told(breaks: bool, kind: str) -> None:
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
        assert caught.value.kind == kind
        response.release()
        gate.open.set()


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
        response = await client.post()
        assert await response.read_some(5.0) == b"hel"
        gate.open.set()
        with pytest.raises(UpstreamError) as caught:
            await response.read_some(5.0)
        assert caught.value.kind == "cut"
        response.release()


@pytest.mark.parametrize("last", [OK.replace(b"200 OK\r\n", b"200 OK\r\nconnection: close\r\n"), OK + OK])
async def test_a_connection_that_closes_or_answers_twice_is_not_used_again(last: bytes) -> None:
    async with client_of(mock.raw_answer(last), FINE) as client:
        assert [await client.read() for _ in range(2)] == [b"ok", b"ok"]
        assert client.mock.connections == 2


async def test_an_interim_answer_is_passed_over() -> None:
    async with client_of(mock.raw_answer(b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\n" + OK), FINE) as client:
        response = await client.post()
        assert (response.status, response.headers) == (200, [(b"content-length", b"2")])
        assert await response.read_all(5, 100) == b"ok"
        response.release()
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
    async with client_of(FINE) as client:
        await client.read()
        monkeypatch.setattr(pool_module, "IDLE_S", 0.0)
        assert client.upstream.pool(client.worker).take_idle(asyncio.get_running_loop().time()) is None
        assert client.upstream.open_count == 0


async def test_silence_before_the_head_or_in_the_body_times_out_and_is_cut() -> None:
    async with client_of(mock.hang(), mock.stream([b"one", b"two"], Gate(), gate_after=1)) as client:
        with pytest.raises(UpstreamError) as caught:
            await client.post(head_s=0.05)
        assert caught.value.kind == "timeout"
        await client.mock.wait_until(lambda: client.mock.disconnected == 1)
        response = await client.post()
        assert await response.read_some(5) == b"one"
        with pytest.raises(UpstreamError) as caught:
            await response.read_some(0.05)
        assert caught.value.kind == "timeout"
        response.release()
        await client.mock.wait_until(lambda: client.mock.disconnected == 2)


async def test_cancelling_at_any_point_leaves_nothing_open() -> None:
    async with client_of() as client:
        for turns in range(12):
            client.mock.scripts.clear()
            client.mock.script("/x", mock.hang())
            task = asyncio.create_task(client.post())
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
        response = await client.post()
        before = -1
        while sent != before:  # until the sender is stuck
            before = sent
            for _ in range(100):
                await asyncio.sleep(0)
        assert sent < total
        assert len(await response.read_all(5, total)) == total
        response.release()


async def test_cutting_a_worker_fails_what_is_in_flight() -> None:
    gate = Gate()
    async with client_of(mock.hang(gate)) as client:
        failing = asyncio.create_task(client.fails())
        await gate.reached.wait()
        client.upstream.cut_worker(client.worker)
        assert await failing == "down"
