"""One request and its response on an upstream connection: HTTP/1.1 on an asyncio protocol, parsed by
httptools.

Rules:
- A `Connection` carries one `Exchange` at a time. The exchange's owner must `release()` it on every path;
released whole
  and clean the connection is kept alive, otherwise it is cut at once, and that is what aborts the request
  in the worker.
- Body bytes are handed on as they came (transfer coding removed); they are never looked at.
- Back-pressure: beyond `HIGH_WATER_BYTES` unread, reading from the worker pauses until the reader has
taken them.
- A body without length that ends with the connection is whole; one with a length or chunked coding that
does so is cut
  short, which is an error, as are bytes that are not HTTP, a head without end, and bytes nobody asked for.
- Every wait has a deadline (see `deadlines`), counted only while somebody waits for the worker, not while
the client
  is slow to read.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections import deque
from typing import Literal, cast

import httptools

from pdserve.errors import PdserveError
from pdserve.router.deadlines import Deadlines

HIGH_WATER_BYTES = 256 * 1024
MAX_HEAD_BYTES = 64 * 1024
"""Longest response head (status line and headers); uvicorn's own bound for requests is the same."""
JOIN_BYTES = 16 * 1024
"""Up to here copying the body behind the head costs less than a second write."""

ErrorKind = Literal["connect", "timeout", "closed", "protocol", "busy", "cut", "down"]


class UpstreamError(PdserveError):
    """A worker did not answer as HTTP wants it to. `kind` is one word for metrics and log lines."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind


class Exchange:
    """The response to one request. Chunks are kept until read, bounded by back-pressure."""

    __slots__ = (
        "_buffered_bytes",
        "_chunks",
        "_connection",
        "_deadlines",
        "_paused",
        "_waiter",
        "complete",
        "deadline_s",
        "error",
        "headers",
        "received_bytes",
        "status",
    )

    def __init__(self, connection: Connection, deadlines: Deadlines) -> None:
        self._connection: Connection | None = connection
        self._deadlines = deadlines
        self._chunks: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self.deadline_s = math.inf
        self.status = 0
        """0 until the head has come."""
        self.headers: list[tuple[bytes, bytes]] = []
        """Names in lower case."""
        self.complete = False
        self.error: UpstreamError | None = None
        self.received_bytes = 0
        deadlines.add(self)

    # --- for the owner

    async def head(self, timeout_s: float) -> int:
        """The response's status, once its head is there. Raises UpstreamError."""
        while not self.status:
            if self.error is not None:
                raise self.error
            await self._wait(timeout_s)
        return self.status

    async def read_some(self, timeout_s: float) -> bytes:
        """The next bytes of the body, everything that is there; b"" at its end. Raises UpstreamError when
        it breaks.
        """
        while not self._chunks:
            if self.error is not None:
                raise self.error
            if self.complete:
                return b""
            await self._wait(timeout_s)
        chunks = self._chunks
        data = chunks.popleft() if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._buffered_bytes = 0
        if self._paused:
            self._paused = False
            if self._connection is not None:
                self._connection.resume_reading()
        return data

    async def read_all(self, timeout_s: float, limit_bytes: int) -> bytes:
        """The whole body. Raises UpstreamError when it breaks or is longer than `limit_bytes`."""
        data = await self.read_some(timeout_s)
        if self.at_end:
            return data
        parts, size = [data], len(data)
        while data := await self.read_some(timeout_s):
            parts.append(data)
            size += len(data)
            if size > limit_bytes:
                raise UpstreamError("protocol", f"answer is longer than {limit_bytes} bytes")
        return b"".join(parts)

    @property
    def at_end(self) -> bool:
        """The whole body has come and been read."""
        return self.complete and not self._chunks

    def release(self) -> None:
        """The owner is done: keep the connection if the response came whole, else cut it. May be called
        again.
        """
        self._deadlines.discard(self)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.end_exchange(self.complete and self.error is None)

    # --- for the deadline sweep

    def expire(self) -> None:
        """Nothing came in time."""
        self.fail(UpstreamError("timeout", "the worker did not answer in time"))

    # --- for the connection

    def fail(self, error: UpstreamError) -> None:
        """The response breaks off here; bytes that came before can still be read."""
        if self.error is None and not self.complete:
            self.error = error
        self.wake()

    def push(self, data: bytes) -> None:
        """A piece of the body."""
        self._chunks.append(data)
        self._buffered_bytes += len(data)
        if self._buffered_bytes > HIGH_WATER_BYTES and not self._paused and self._connection is not None:
            self._paused = True
            self._connection.pause_reading()
        self.wake()

    def wake(self) -> None:
        """There is something new for the owner."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        self.deadline_s = loop.time() + timeout_s
        try:
            await self._waiter
        finally:
            self._waiter = None
            self.deadline_s = math.inf


class Connection(asyncio.Protocol):
    """A keep-alive connection to a worker."""

    def __init__(self, pool: ConnectionOwner) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._has_length = False
        self._interim = False
        self._keep_alive = True
        self._closed = False
        self.used = False
        """A request was sent on it before: it may have gone stale."""
        self.idle_since_s = 0.0

    # --- for the pool

    @property
    def is_usable(self) -> bool:
        """Open, idle and clean."""
        return not self._closed and self._exchange is None and self._keep_alive

    def start(self, head: bytes, body: bytes, deadlines: Deadlines) -> Exchange:
        """Send a request; the caller owns the exchange. Raises UpstreamError if the connection is gone
        already.
        """
        transport = self._transport
        if transport is None or self._closed:
            raise UpstreamError("closed", "the connection was closed")
        exchange = self._exchange = Exchange(self, deadlines)
        if len(body) <= JOIN_BYTES:
            transport.write(head + body)
        else:
            transport.writelines([head, body])
        return exchange

    def cut(self) -> None:
        """Close at once; what was not sent yet is dropped."""
        self._closed = True
        self._pool.forget(self)
        if self._transport is not None:
            self._transport.abort()

    def fail(self, error: UpstreamError) -> None:
        """Close at once; the exchange on it, if any, fails with `error`."""
        if self._exchange is not None:
            self._exchange.fail(error)
        self.cut()

    # --- for the exchange

    def pause_reading(self) -> None:
        """Take no more bytes from the worker."""
        if self._transport is not None and not self._closed:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Take bytes from the worker again."""
        if self._transport is not None and not self._closed:
            self._transport.resume_reading()

    def end_exchange(self, whole: bool) -> None:
        """The exchange's owner is done with it."""
        self._exchange = None
        self.used = True
        if whole and self._keep_alive and not self._closed:
            self.resume_reading()
            self._pool.keep(self)
        else:
            self.cut()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands."""
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Bytes from the worker."""
        exchange = self._exchange
        if exchange is None:  # bytes nobody asked for: whatever they are, the connection is out of step
            self._drop()
            return
        exchange.received_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._keep_alive = False
            exchange.fail(UpstreamError("protocol", f"answer is not HTTP: {error}"))
            return
        if not exchange.status and exchange.received_bytes > MAX_HEAD_BYTES:
            self._keep_alive = False
            exchange.fail(UpstreamError("protocol", f"answer's head is longer than {MAX_HEAD_BYTES} bytes"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, by us or by the worker."""
        self._closed = True
        exchange = self._exchange
        if exchange is not None and not exchange.complete:
            if exchange.status and not self._has_length and exchange.error is None:
                exchange.complete = True  # no length: the end of the connection is the end of the body
                exchange.wake()
            else:
                kind: ErrorKind = "cut" if exchange.status else "closed"
                exchange.fail(UpstreamError(kind, "the worker closed the connection"))
        self._pool.forget(self)

    def _drop(self) -> None:
        self._keep_alive = False
        self.cut()

    # --- httptools

    def on_message_begin(self) -> None:
        """A head begins."""
        if self._exchange is None or self._exchange.complete:
            self._keep_alive = False  # a second answer to one request: out of step
        self._has_length = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line."""
        exchange = self._exchange
        if exchange is None or exchange.complete:
            return
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._has_length = True
        exchange.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is whole; a 1xx head is dropped, the real one follows."""
        exchange = self._exchange
        if exchange is None or exchange.complete:
            return
        status: int = self._parser.get_status_code()
        self._interim = status < 200
        if self._interim:
            exchange.headers.clear()
            return
        exchange.status = status
        exchange.wake()

    def on_body(self, body: bytes) -> None:
        """A piece of the body, transfer coding removed."""
        exchange = self._exchange
        if exchange is not None and not exchange.complete:
            exchange.push(body)

    def on_message_complete(self) -> None:
        """The response is whole."""
        if self._interim:
            self._interim = False
            return
        exchange = self._exchange
        if exchange is None or exchange.complete:
            return
        if not self._parser.should_keep_alive():
            self._keep_alive = False
        exchange.complete = True
        exchange.wake()


class ConnectionOwner:
    """What a connection tells its pool."""

    def keep(self, connection: Connection) -> None:
        """`connection` is idle and clean."""
        raise NotImplementedError

    def forget(self, connection: Connection) -> None:
        """`connection` is closed or of no more use. May be told twice."""
        raise NotImplementedError
