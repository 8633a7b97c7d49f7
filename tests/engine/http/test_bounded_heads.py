"""Heads that strangers send to a worker's port: too long, too many lines, too slow."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn

from pdserve.engine.http import bounded_heads
from pdserve.engine.http.bounded_heads import MAX_HEAD_BYTES, MAX_HEADERS, MAX_PIPELINED, BoundedHeads
from pdserve.security.connection_limits import ConnectionLimit

HEAD = b"GET / HTTP/1.1\r\nhost: t\r\n"


async def app(scope: dict[str, object], receive: object, send: object) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": b"ok"})  # type: ignore[operator]


@contextlib.asynccontextmanager
async def serving(http: Any = BoundedHeads) -> AsyncIterator[int]:
    config = uvicorn.Config(
        app, port=0, http=http, log_level="error", lifespan="off", timeout_keep_alive=1000
    )  # what closes a connection is under test
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110  uvicorn has no event for it
            await asyncio.sleep(0.01)


async def answer(port: int, *parts: bytes) -> bytes:
    """All that is answered until the server closes; the client sends no end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            with contextlib.suppress(OSError):
                writer.write(part)
                await writer.drain()
        with contextlib.suppress(ConnectionResetError):
            return await reader.read()
        return b"reset"
    finally:
        writer.close()


@pytest.mark.parametrize(
    "parts",
    [
        (HEAD, b"x: " + b"y" * MAX_HEAD_BYTES),
        (HEAD, b"x: y\r\n" * (MAX_HEADERS + 1)),
        (HEAD + b"x: y\r\n" * (MAX_HEADERS + 1) + b"\r\n",),
    ],
    ids=["bytes", "lines", "lines at once"],
)
def test_a_head_beyond_the_bounds_is_refused(parts: tuple[bytes, ...]) -> None:
    async def run() -> bytes:
        async with serving() as port:
            return await answer(port, *parts)

    assert b" 200 " not in asyncio.run(run())  # it ends: the connection is closed


def test_so_is_a_second_one_after_a_first_that_was_answered() -> None:
    async def run() -> None:
        async with serving() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD + b"\r\n" + HEAD)
            assert b" 200 " in await reader.readuntil(b"\r\n0\r\n\r\n")
            with contextlib.suppress(OSError):
                writer.write(b"x: " + b"y" * MAX_HEAD_BYTES)
                await writer.drain()
            with contextlib.suppress(ConnectionResetError):
                assert b" 200 " not in await reader.read()
            writer.close()

    asyncio.run(run())


def test_ordinary_requests_and_long_bodies_are_served() -> None:
    async def run() -> bytes:
        async with serving() as port:
            body = b"x" * (3 * MAX_HEAD_BYTES)
            post = b"POST / HTTP/1.1\r\nhost: t\r\ncontent-length: %d\r\n\r\n" % len(body)
            last = HEAD + b"connection: close\r\n\r\n"
            return await answer(port, post + body, HEAD + b"\r\n", last)

    assert asyncio.run(run()).count(b" 200 ") == 3


def test_beyond_the_bound_connections_go_that_wait_for_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger who opens as many sockets as the worker may have keeps no router out."""
    monkeypatch.setattr(bounded_heads, "HEAD_S", 1000.0)
    connection_limit: ConnectionLimit[BoundedHeads] = ConnectionLimit(8)

    async def run() -> bytes:
        async with serving(functools.partial(BoundedHeads, connection_limit=connection_limit)) as port:
            strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            await until(lambda: len(connection_limit) == 8)
            said = await answer(port, HEAD + b"connection: close\r\n\r\n")
            for reader, writer in strangers[:12]:
                async with asyncio.timeout(10):
                    with contextlib.suppress(ConnectionResetError):
                        assert await reader.read() == b""
                writer.close()
            return said

    assert asyncio.run(run()).count(b" 200 ") == 1


def test_who_sends_thousands_of_requests_at_once_is_closed_and_takes_a_bounded_memory() -> None:
    """Each that waits takes some kilobytes; 40 strangers made a worker half as large again."""
    waiting = []

    class Watched(BoundedHeads):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            waiting.append(len(self.pipeline))

    async def run() -> bytes:
        async with serving(Watched) as port:
            return await answer(port, (HEAD + b"\r\n") * 5000)

    assert asyncio.run(run()).count(b"200 OK") <= MAX_PIPELINED + 1
    assert max(waiting) <= MAX_PIPELINED


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"\r\n" + HEAD])
def test_a_head_that_does_not_end_in_time_ends_the_connection(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_heads, "HEAD_S", 0.1)

    async def run() -> bytes:
        async with serving() as port:
            return await answer(port, sent)

    assert asyncio.run(run()).count(b" 200 ") == sent.count(b"\r\n\r\n")
