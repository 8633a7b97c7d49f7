"""A client's connection: uvicorn's httptools protocol, with bounds on slow and endless heads and a quiet end.

uvicorn bounds how long a connection may be idle after an answer. Here are bounds on the rest of what a client
may do instead of asking: send nothing, send its head (or a body that nobody waits for) drop by drop, send a
head without an end. Who reads a body bounds that one (hot.py).

When the router stops, uvicorn closes connections as soon as they are idle, and a request that is on its way
there is lost. So an idle connection lives on for `LINGER_S`, and what comes is answered, with `Connection:
close`; a stream's connection, too, whose head has promised that it stays, and one that was accepted a moment
before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from pdserve.router.coalesce import CoalescingTransport

MAX_HEAD_BYTES = 64 * 1024
"""Longest request line and headers; httptools has no bound of its own."""
LINGER_S = 1.0
SCOPE_KEY: Final = "pdserve.client"
"""Where the ASGI scope of a request has the connection that it came on."""
_CLOSING = b"content-length: 0\r\nconnection: close\r\n\r\n"
_TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\n" + _CLOSING
_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\n" + _CLOSING


class Connections(ServerState):
    """uvicorn's, and whether the server has begun to stop."""

    is_stopping = False


class ClientProtocol(HttpToolsProtocol):
    """One connection. A head must be whole within `head_s` of its first byte."""

    def __init__(self, *, head_s: float, **given: Any) -> None:
        super().__init__(**given)
        self._head_s = head_s
        self._head_bytes = 0
        self._in_head = True
        self._has_ended = False
        """A request ended in what was received last; the rest of that does not count to the next head."""
        self._late: asyncio.TimerHandle | None = None
        self._is_last = False
        """The router stops: the next answer here is the last."""
        self._is_gone = False
        self._on_gone: Callable[[], None] | None = None

    def connection_made(self, transport: Any) -> None:
        """The client's connection stands."""
        super().connection_made(CoalescingTransport(transport, self.loop))  # type: ignore[arg-type]
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
        if isinstance(self.server_state, Connections) and self.server_state.is_stopping:
            self.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        self._unset_late()
        super().connection_lost(exc)
        # request and connection hold each other, and the garbage collector runs seldom (serve.py)
        self.cycle = self.scope = None  # type: ignore[assignment]
        self._is_gone = True
        if self._on_gone is not None:
            self._on_gone()

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Call `on_gone` when the client goes away, now if it has, until `unwatch`. A task that waits for
        ASGI's `http.disconnect` does the same; it would be one more for each request.
        """
        self._on_gone = on_gone
        self.flow.resume_reading()  # paused for a large body, which was read
        if self._is_gone:
            on_gone()

    def unwatch(self) -> None:
        """The request is over."""
        self._on_gone = None

    def data_received(self, data: bytes) -> None:
        """Bytes from the client. A head of more than `MAX_HEAD_BYTES` ends the connection."""
        self._has_ended = False
        super().data_received(data)
        if self._in_head:
            self._head_bytes = 0 if self._has_ended else self._head_bytes + len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._end(_TOO_LONG)
            elif self._head_bytes and self._late is None:
                self._late = self.loop.call_later(self._head_s, self._on_late)

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self.scope[SCOPE_KEY] = self  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._in_head = False
        self._unset_late()
        super().on_headers_complete()
        if self._is_last:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """The request is whole; what comes next is another head."""
        self._in_head = self._has_ended = True
        self._unset_late()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is sent. Should the request not be whole, the rest has as much time as a head."""
        super().on_response_complete()
        if not self._in_head and self._late is None:
            self._late = self.loop.call_later(self._head_s, self._on_late)
        if self._is_last:
            self.loop.call_later(LINGER_S, self._close_idle)

    def shutdown(self) -> None:
        """The router stops."""
        self._is_last = True
        if not self._is_answering:
            self.loop.call_later(LINGER_S, self._close_idle)
        elif not self.cycle.response_started:
            self.cycle.keep_alive = False

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _close_idle(self) -> None:
        if not self._is_answering:
            self.transport.close()

    def _on_late(self) -> None:
        self._late = None
        if self._is_answering:  # an earlier request: it is not to suffer
            self._late = self.loop.call_later(self._head_s, self._on_late)
        else:
            self._end(_TOO_LATE if self._in_head else b"")

    def _end(self, answer: bytes) -> None:
        """Close, with an answer where none is under way."""
        if answer and not self._is_answering and not self.transport.is_closing():
            self.transport.write(answer)
        self.transport.close()

    def _unset_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
