"""A keep-alive connection to a worker: HTTP/1.1 on an asyncio protocol, parsed by httptools.

Rules:
- A `Connection` carries one `Response` at a time.
- Body bytes are handed on as they came (transfer coding removed); they are never looked at.
- A body without length that ends with the connection is whole, unless that was reset; one with a length or
  chunked coding that does so is cut short, which is an error, as are bytes that are not HTTP, a head without
  end, and bytes nobody asked for.
- 1xx heads are passed over.
"""

from __future__ import annotations

import asyncio
import socket
from typing import cast

import httptools

from pdserve.router.deadlines import Deadlines
from pdserve.router.upstream.response import ErrorKind, Response, UpstreamError

MAX_HEAD_BYTES = 64 * 1024
"""Longest response head (status line and headers); uvicorn's own bound for requests is the same."""
JOIN_BYTES = 16 * 1024
"""Up to here copying the body behind the head costs less than a second write."""


class ConnectionOwner:
    """What a connection tells its pool."""

    def keep(self, connection: Connection) -> None:
        """`connection` is idle and clean."""
        raise NotImplementedError

    def forget(self, connection: Connection) -> None:
        """`connection` is closed or of no more use. May be told twice."""
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
        self.used = False
        """A request was sent on it before: it may have gone stale."""
        self.idle_since_s = 0.0

    # --- for the pool

    @property
    def is_usable(self) -> bool:
        """Open, idle and clean."""
        return not self._closed and self._response is None and self._keep_alive

    def start(self, head: bytes, body: bytes, deadlines: Deadlines) -> Response:
        """Send a request; the caller owns the response. Raises UpstreamError if the connection is gone
        already.
        """
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
        """Close at once; what was not sent yet is dropped."""
        self._closed = True
        self._pool.forget(self)
        if self._transport is not None:
            self._transport.abort()

    def fail(self, error: UpstreamError) -> None:
        """Close at once; the response on it, if any, fails with `error`."""
        if self._response is not None:
            self._response.fail(error)
        self.cut()

    # --- for the response

    def pause_reading(self) -> None:
        """Take no more bytes from the worker."""
        if self._transport is not None and not self._closed:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Take bytes from the worker again."""
        if self._transport is not None and not self._closed:
            self._transport.resume_reading()

    def end_response(self, whole: bool) -> None:
        """The response's owner is done with it."""
        self._response = None
        self.used = True
        if whole and self._keep_alive and not self._closed:
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
        response = self._response
        if response is None:  # bytes nobody asked for: whatever they are, the connection is out of step
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
        """The connection is gone, by us or by the worker."""
        self._closed = True
        del (
            self._parser
        )  # they hold each other, and the garbage collector runs seldom (`processes/serving.py`)
        response = self._response
        if response is not None and not response.complete:
            if response.status and not self._has_length and response.error is None and exc is None:
                response.complete = True  # no length: the end of the connection is the end of the body
                response.wake()
            else:
                kind: ErrorKind = "cut" if response.status else "closed"
                response.fail(UpstreamError(kind, "the worker closed the connection"))
        self._pool.forget(self)

    def _drop(self) -> None:
        self._keep_alive = False
        self.cut()

    # --- httptools

    def on_message_begin(self) -> None:
        """A head begins."""
        if self._response is None or self._response.complete:
            self._keep_alive = False  # a second answer to one request: out of step
        self._has_length = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line."""
        response = self._response
        if response is None or response.complete:
            return
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._has_length = True
        response.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is whole; a 1xx head is dropped, the real one follows."""
        response = self._response
        if response is None or response.complete:
            return
        status: int = self._parser.get_status_code()
        self._interim = status < 200
        if self._interim:
            response.headers.clear()
            return
        response.status = status
        response.wake()

    def on_body(self, body: bytes) -> None:
        """A piece of the body, transfer coding removed."""
        response = self._response
        if response is not None and not response.complete:
            response.push(body)

    def on_message_complete(self) -> None:
        """The response is whole."""
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
