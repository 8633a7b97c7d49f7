"""A connection to a worker, its TLS, and the response that comes on it.

A connection to a worker, and the response that comes on it.

One response of a worker while it arrives: its buffered body, its waiting reader, its end or error.

- The caller of the request owns the `Response` and must `release()` it on every path. After a complete
  response the connection is kept alive. Otherwise it is closed, which aborts the request in the worker.
- Back-pressure: beyond `HIGH_WATER_BYTES` of unread body, reading from the worker pauses.
- Every wait has a deadline (see `deadlines`). It counts only the time of waiting for the worker, not the time
  in which a slow client reads.
- Waking a task for each token of each stream costs more than passing the token on. So the relay of a stream
  may register a `Taker`: a callback that gets the bytes as soon as they are read from the connection.

A keep-alive connection to a worker: HTTP/1.1 on an asyncio protocol, parsed by httptools.

Rules:
- A `Connection` carries one `Response` at a time.
- Body bytes are passed on unread; only the transfer coding is removed.
- A body without a length is complete when the connection ends, unless the connection was reset, or TLS was
  spoken: then the end may be a stranger's.
- A body with a length or chunked coding must not end with the connection: that is an error.
- Bytes that are not HTTP, an endless head, and bytes without a request are errors.
- 1xx heads are skipped.

TLS to workers: with `tls.ca` every worker is reached by https, without it by http. Nothing falls back.

Names of workers also come from etcd and the admin API. A name with the other scheme is not connected to.
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import Final, Literal, Protocol, TypeAlias, cast

import httptools

from pdserve.errors import PdserveError
from pdserve.router.deadlines import Deadlines
from pdserve.security.tls import Certificates, TlsConfig

HIGH_WATER_BYTES = 256 * 1024

ErrorKind = Literal["connect", "timeout", "closed", "protocol", "busy", "cut", "down"]

Taker: TypeAlias = Callable[[bytes], bool]
"""Takes a piece of the body and returns True, or returns False to decline it. Must not raise."""


class UpstreamError(PdserveError):
    """A worker did not give a complete HTTP answer. `kind` is one word for metrics and log lines."""

    def __init__(self, kind: ErrorKind, message: str, *, is_down: bool = False) -> None:
        """`is_down`: its port is closed, or its URL cannot be used: it is not busy or far away."""
        super().__init__(message)
        self.kind: ErrorKind = kind
        self.is_down = is_down


class Carrier(Protocol):
    """The methods of a connection that a response calls."""

    def pause_reading(self) -> None:
        """Stop reading bytes from the worker."""
        ...

    def resume_reading(self) -> None:
        """Read bytes from the worker again."""
        ...

    def end_response(self, whole: bool) -> None:
        """The response's owner has released it. `whole`: the response is complete and without error."""
        ...


class Response:
    """The response to one request. Chunks are buffered until they are read; back-pressure bounds them."""

    __slots__ = (
        "_buffered_bytes",
        "_chunks",
        "_connection",
        "_deadlines",
        "_paused",
        "_taker",
        "_timeout_s",
        "_waiter",
        "complete",
        "deadline_s",
        "error",
        "headers",
        "received_bytes",
        "status",
    )

    def __init__(self, connection: Carrier, deadlines: Deadlines) -> None:
        self._connection: Carrier | None = connection
        self._deadlines = deadlines
        self._chunks: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._taker: Taker | None = None
        self._timeout_s = math.inf
        """Timeout of the current wait."""
        self.deadline_s = math.inf
        self.status = 0
        """0 until the head has arrived."""
        self.headers: list[tuple[bytes, bytes]] = []
        """Pairs of name and value; names are in lower case."""
        self.complete = False
        self.error: UpstreamError | None = None
        self.received_bytes = 0
        deadlines.add(self)

    # --- for the owner

    def news(self, timeout_s: float) -> asyncio.Future[None]:
        """A future that is done when more of the response has arrived, or its end. The deadline starts now.
        Raises UpstreamError where nothing more will come.
        """
        if self.error is not None:
            raise self.error
        loop = self._deadlines.loop
        self._waiter = waiter = loop.create_future()
        self._timeout_s = timeout_s
        self.deadline_s = loop.time() + timeout_s
        return waiter

    async def read_some(self, timeout_s: float) -> bytes:
        """Wait for bytes of the body. Returns all buffered bytes, or b"" at the end. Raises UpstreamError."""
        while not self._chunks:
            if self.complete and self.error is None:
                return b""
            await self.news(timeout_s)
        return self.take()

    async def give(self, taker: Taker, timeout_s: float) -> bytes:
        """Pass arriving bytes to `taker` until it declines, or until the body ends or fails.

        Returns the bytes that `taker` did not take, as `read_some` does. The deadline starts again with each
        piece that `taker` takes. The bytes that arrive with the end of the body are returned, not passed.
        """
        self._taker = taker
        try:
            return await self.read_some(timeout_s)
        finally:
            self._taker = None

    def take(self) -> bytes:
        """All buffered bytes of the body."""
        chunks = self._chunks
        data = chunks.popleft() if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._buffered_bytes = 0
        if self._paused:
            self._resume()
        return data

    async def read_all(self, timeout_s: float, limit_bytes: int) -> bytes:
        """The complete body. Raises UpstreamError if it breaks off or is longer than `limit_bytes`."""
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
        """The body has arrived completely and was read completely."""
        return self.complete and not self._chunks

    def release(self) -> None:
        """Keep the connection if the response is complete, else close it. Further calls have no effect."""
        self._deadlines.discard(self)
        if self._paused:
            self._resume()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.end_response(self.complete and self.error is None)
        self.error = None  # a reference cycle: its traceback refers to this response

    # --- for the deadline sweep

    def expire(self) -> None:
        """The deadline has passed."""
        self.fail(UpstreamError("timeout", "the worker did not answer in time"))

    # --- for the connection

    def fail(self, error: UpstreamError) -> None:
        """The response breaks off with `error`. Bytes that arrived before can still be read."""
        if self.error is None and not self.complete:
            self.error = error
        self.wake()

    def push(self, data: bytes) -> None:
        """Buffer a piece of the body. Pause reading from the worker if too much is unread."""
        self._chunks.append(data)
        self._buffered_bytes += len(data)
        if self._buffered_bytes > HIGH_WATER_BYTES and not self._paused and self._connection is not None:
            self._paused = True
            self._connection.pause_reading()

    def received(self) -> None:
        """The pieces of one read from the connection are all pushed: give them to the taker or the reader."""
        if self._waiter is None or not self._chunks:
            return
        if self._taker is not None:
            data = self.take()
            if self._taker(data):
                self.deadline_s = self._deadlines.loop.time() + self._timeout_s
                return
            self.push(data)
        self.wake()

    def wake(self) -> None:
        """Wake the task that waits for this response."""
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            self.deadline_s = math.inf
            if not waiter.done():  # cancelled: the owner is about to release
                waiter.set_result(None)

    def _resume(self) -> None:
        self._paused = False
        if self._connection is not None:
            self._connection.resume_reading()


MAX_HEAD_BYTES = 64 * 1024
"""Longest response head (status line and headers). uvicorn has the same limit for requests."""
MAX_STATUS = 599
JOIN_BYTES = 16 * 1024
"""Up to this size, copying head and body together costs less than a second write."""


class ConnectionOwner:
    """The events that a connection reports to its pool."""

    def keep(self, connection: Connection) -> None:
        """`connection` is idle and can carry another request."""
        raise NotImplementedError

    def forget(self, connection: Connection) -> None:
        """`connection` is closed or unusable. A connection may report this twice."""
        raise NotImplementedError


class Connection(asyncio.Protocol):
    """A keep-alive connection to a worker."""

    def __init__(self, pool: ConnectionOwner) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._response: Response | None = None
        self._has_length = False
        self._interim = False
        self._keep_alive = True
        self._closed = False
        self._is_tls = False
        self.used = False
        """It has carried a request before, so the worker may have closed it meanwhile."""
        self.idle_since_s = 0.0

    # --- for the pool

    @property
    def is_usable(self) -> bool:
        """The connection is open, idle and can carry a request."""
        return not self._closed and self._response is None and self._keep_alive

    def start(self, head: bytes, body: bytes, deadlines: Deadlines) -> Response:
        """Send a request; the caller owns the response. Raises UpstreamError if the connection is closed."""
        transport = self._transport
        if transport is None or self._closed:
            raise UpstreamError("closed", "the connection was closed")
        response = self._response = Response(self, deadlines)
        if len(body) <= JOIN_BYTES:
            transport.write(head + body)
        else:
            transport.writelines([head, body])
        return response

    def cut(self) -> None:
        """Close at once; unsent bytes are dropped."""
        self._closed = True
        self._pool.forget(self)
        if self._transport is not None:
            self._transport.abort()

    def fail(self, error: UpstreamError) -> None:
        """Close at once; the current response, if any, fails with `error`."""
        if self._response is not None:
            self._response.fail(error)
        self.cut()

    # --- for the response

    def pause_reading(self) -> None:
        """Stop reading bytes from the worker."""
        if self._transport is not None and not self._closed:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read bytes from the worker again."""
        if self._transport is not None and not self._closed:
            self._transport.resume_reading()

    def end_response(self, whole: bool) -> None:
        """The response's owner has released it. `whole`: the response is complete and without error."""
        self._response = None
        self.used = True
        if whole and self._keep_alive and not self._closed:
            self._pool.keep(self)
        else:
            self.cut()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open: send small writes at once (TCP_NODELAY; Unix sockets do so anyway)."""
        self._transport = cast("asyncio.Transport", transport)
        self._is_tls = transport.get_extra_info("ssl_object") is not None
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Parse bytes from the worker."""
        response = self._response
        if response is None:  # bytes without a request: the connection is out of step
            self._drop()
            return
        response.received_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._keep_alive = False
            response.fail(UpstreamError("protocol", f"answer is not HTTP: {error}"))
            return
        response.received()
        if not response.status and response.received_bytes > MAX_HEAD_BYTES:
            self._keep_alive = False
            response.fail(UpstreamError("protocol", f"answer's head is longer than {MAX_HEAD_BYTES} bytes"))

    def connection_lost(self, exc: Exception | None) -> None:
        """This side or the worker has closed the connection."""
        self._closed = True
        del self._parser  # a reference cycle, and the garbage collector runs seldom (`processes/serving.py`)
        response = self._response
        if response is not None and not response.complete:
            has_end = exc is None and not self._has_length and not self._is_tls
            if response.status and has_end and response.error is None:
                response.complete = True  # no length: the end of the connection is the end of the body
                response.wake()
            else:
                kind: ErrorKind = "cut" if response.status else "closed"
                refused = self._is_tls and not self.used and not response.received_bytes
                why = f" before an answer: {ASKS_FOR_CERTIFICATE}" if refused else ""
                response.fail(UpstreamError(kind, f"the worker closed the connection{why}"))
        self._pool.forget(self)

    def _drop(self) -> None:
        self._keep_alive = False
        self.cut()

    # --- httptools

    def on_message_begin(self) -> None:
        """The parser found the begin of a head."""
        if self._response is None or self._response.complete:
            self._keep_alive = False  # a second answer to one request: out of step
        self._has_length = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """The parser found a header line, or a trailer, which is passed over."""
        response = self._response
        if response is None or response.complete or response.status:
            return
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._has_length = True
        response.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is complete. A 1xx head is dropped: the final head follows."""
        response = self._response
        if response is None or response.complete:
            return
        status: int = self._parser.get_status_code()
        self._interim = status < 200
        if self._interim:
            response.headers.clear()
            return
        if status > MAX_STATUS:
            self._keep_alive = False
            response.fail(UpstreamError("protocol", f"answer's status is {status}"))
            return
        response.status = status
        response.wake()

    def on_body(self, body: bytes) -> None:
        """The parser found a piece of the body, with the transfer coding removed."""
        response = self._response
        if response is not None and not response.complete:
            response.push(body)

    def on_message_complete(self) -> None:
        """The response is complete."""
        if self._interim:
            self._interim = False
            return
        response = self._response
        if response is None or response.complete:
            return
        if not self._parser.should_keep_alive():
            self._keep_alive = False
        response.complete = True
        response.wake()


ASKS_FOR_CERTIFICATE: Final = "does it ask for a certificate (tls.client_ca)?"
"""Said where a connection with TLS ends before any answer. In TLS 1.3 a client learns of its refusal so."""


class Addressed(Protocol):
    """The attributes of a worker that decide how it is reached."""

    id: str
    is_tls: bool


class WorkerTls:
    """Chooses the TLS context of each new connection to a worker."""

    def __init__(self, config: TlsConfig | None = None) -> None:
        """Raises ConfigError for files that cannot be used."""
        self._certificates = Certificates(config or TlsConfig())

    def context(self, worker: Addressed) -> ssl.SSLContext | None:
        """None: plain HTTP. Raises UpstreamError `connect` for a worker of the other scheme."""
        context = self._certificates.client_context
        if worker.is_tls and context is None:
            what = f"worker {worker.id}: https needs tls.ca at the router"
            raise UpstreamError("connect", what, is_down=True)
        if context is not None and not worker.is_tls:
            what = f"worker {worker.id}: its URL is http, and tls.ca asks for https"
            raise UpstreamError("connect", what, is_down=True)
        return context
