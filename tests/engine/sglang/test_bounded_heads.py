"""Heads that strangers send to a worker's port: too long, too many lines, too slow."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn

from pdserve.engine.sglang import http_server
from pdserve.engine.sglang.http_server import MAX_HEAD_BYTES, MAX_HEADERS, MAX_PIPELINED, BoundedHeads
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


LONG_LINE, LINES = b"x: " + b"y" * MAX_HEAD_BYTES, b"x: y\r\n" * (MAX_HEADERS + 1)


@pytest.mark.parametrize(
    ("parts", "answered"),
    [
        ((HEAD, LONG_LINE), 0),
        ((HEAD, LINES), 0),
        ((HEAD + LINES + b"\r\n",), 0),
        ((HEAD + b"\r\n" + HEAD, LONG_LINE), 1),
    ],
    ids=["bytes", "lines", "lines at once", "a second one"],
)
async def test_a_head_beyond_the_bounds_is_refused(parts: tuple[bytes, ...], answered: int) -> None:
    async with serving() as port:
        said = await answer(port, *parts)  # it ends: the connection is closed
    assert said == b"reset" or said.count(b" 200 ") == answered


async def test_ordinary_requests_and_long_bodies_are_served() -> None:
    body = b"x" * (3 * MAX_HEAD_BYTES)
    post = b"POST / HTTP/1.1\r\nhost: t\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with serving() as port:
        said = await answer(port, post + body, HEAD + b"\r\n", HEAD + b"connection: close\r\n\r\n")
    assert said.count(b" 200 ") == 3


async def test_beyond_the_bound_connections_go_that_wait_for_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stranger who opens as many sockets as the worker may have keeps no router out."""
    monkeypatch.setattr(http_server, "HEAD_S", 1000.0)
    connection_limit: ConnectionLimit[BoundedHeads] = ConnectionLimit(8)

    async with serving(functools.partial(BoundedHeads, connection_limit=connection_limit)) as port:
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        await until(lambda: len(connection_limit) == 8)
        assert (await answer(port, HEAD + b"connection: close\r\n\r\n")).count(b" 200 ") == 1
        for reader, writer in strangers[:12]:
            async with asyncio.timeout(10):
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
            writer.close()


async def test_who_sends_thousands_of_requests_at_once_is_closed_and_takes_a_bounded_memory() -> None:
    """Each that waits takes some kilobytes; 40 strangers made a worker half as large again."""
    waiting = []

    class Watched(BoundedHeads):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            waiting.append(len(self.pipeline))

    async with serving(Watched) as port:
        assert (await answer(port, (HEAD + b"\r\n") * 5000)).count(b"200 OK") <= MAX_PIPELINED + 1
    assert max(waiting) <= MAX_PIPELINED


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"\r\n" + HEAD])
async def test_a_head_that_does_not_end_in_time_ends_the_connection(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", 0.1)
    async with serving() as port:
        assert (await answer(port, sent)).count(b" 200 ") == sent.count(b"\r\n\r\n")
