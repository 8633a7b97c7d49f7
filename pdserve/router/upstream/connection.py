"""A keep-alive connection to a worker: HTTP/1.1 on an asyncio protocol, parsed by httptools.

Rules:
- A `Connection` carries one `Response` at a time.
- Body bytes are passed on unread; only the transfer coding is removed.
- A body without a length is complete when the connection ends, unless the connection was reset, or TLS was
  spoken: then the end may be a stranger's.
- A body with a length or chunked coding must not end with the connection: that is an error.
- Bytes that are not HTTP, an endless head, and bytes without a request are errors.
- 1xx heads are skipped.
"""

from __future__ import annotations

import asyncio
import socket
from typing import cast

import httptools

from pdserve.router.deadlines import Deadlines
from pdserve.router.upstream.response import ErrorKind, Response, UpstreamError
from pdserve.router.upstream.worker_tls import ASKS_FOR_CERTIFICATE

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
