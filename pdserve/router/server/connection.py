"""A client's connection: uvicorn's httptools protocol, with bounds on slow and endless heads and a quiet end.

uvicorn bounds how long a connection may be idle after an answer. Here are bounds on the rest of what a client
may do instead of asking: send nothing, send its head (or a body that nobody waits for) drop by drop, send a
head without an end. Who reads a body
bounds that one (`app/generation.py`).

When the router stops, uvicorn closes connections as soon as they are idle, and a request that is on its way
there is lost. So an idle connection lives on for `LINGER_S`, and what comes is answered, with `Connection:
close`; a stream's connection, too, whose head has promised that it stays, and one that was accepted a moment
before.

A client that pipelines is read on while an answer is under way, within bounds: who is not read from is not
seen to leave.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from pdserve.router.server.request_cycle import RequestCycle

MAX_HEAD_BYTES = 64 * 1024
"""Longest request line and headers; httptools has no bound of its own."""
MAX_AHEAD = 16
MAX_AHEAD_BYTES = 64 * 1024
"""As many pipelined requests, and bytes of their bodies, are read while an answer is under way."""
LINGER_S = 1.0
CLOSING_S = 2.0
"""Longest wait for a client that was answered before it had sent all."""
_CLOSING = b"content-length: 0\r\nconnection: close\r\n\r\n"
_TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\n" + _CLOSING
_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\n" + _CLOSING


class Connections(ServerState):
    """uvicorn's, and whether the server has begun to stop."""

    is_stopping = False


class DirectHandler(Protocol):
    """Serves some paths past ASGI."""

    @property
    def targets(self) -> Mapping[bytes, str]:
        """Path by request target."""
        ...

    async def serve(self, client: RequestCycle) -> None:
        """Answer one request."""
        ...


class ClientConnection(HttpToolsProtocol):
    """One connection. A head must be whole within `head_s` of its first byte. `direct` gets the requests for
    its targets, and the rest goes to uvicorn's application.
    """

    def __init__(self, *, head_s: float, direct: DirectHandler | None = None, **given: Any) -> None:
        super().__init__(**given)
        self._head_s = head_s
        self._direct = direct
        self._head_bytes = 0
        self._in_head = True
        self._has_ended = False
        """A request ended in what was received last; the rest of that does not count to the next head."""
        self._late: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._idle_since_s = math.inf
        """On the loop's clock; infinite while there is a request."""
        self._is_last = False
        """The router stops: the next answer here is the last."""
        self.is_closing = False
        """All is said, or the client is gone: nothing is sent any more, and what comes is not read."""
        self._is_gone = False
        self._on_gone: Callable[[], None] | None = None

    def connection_made(self, transport: Any) -> None:
        """The client's connection stands."""
        super().connection_made(transport)
        self._idle_since_s = self.loop.time()
        self._idle = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        if isinstance(self.server_state, Connections) and self.server_state.is_stopping:
            self.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        self._unset_late()
        if self._idle is not None:
            self._idle.cancel()
        super().connection_lost(exc)
        # request and connection hold each other, and the garbage collector runs seldom
        self.cycle = self.scope = None  # type: ignore[assignment]
        self._is_gone = self.is_closing = True
        if self._on_gone is not None:
            self._on_gone()

    def timeout_keep_alive_handler(self) -> None:
        """Close if idle for long enough, else look again when it may be. uvicorn sets a timer after each
        answer instead, which costs more than the time it is exact by.
        """
        left_s = self._idle_since_s + self.timeout_keep_alive - self.loop.time()
        if left_s <= 0:
            self.transport.close()
        else:
            left_s = min(left_s, self.timeout_keep_alive)
            self._idle = self.loop.call_later(left_s, self.timeout_keep_alive_handler)

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Call `on_gone` when the client goes away, now if it has, until `unwatch`."""
        self._on_gone = on_gone
        if not self._is_far_ahead:  # reading was paused for a large body, which was read
            self.flow.resume_reading()
        if self._is_gone:
            on_gone()

    def unwatch(self) -> None:
        """The request is over."""
        self._on_gone = None

    def data_received(self, data: bytes) -> None:
        """Bytes from the client. A head of more than `MAX_HEAD_BYTES` ends the connection."""
        if self.is_closing:
            return
        self._has_ended = False
        self._idle_since_s = math.inf
        super().data_received(data)
        if self.pipeline and not self.transport.is_closing():
            if self._is_far_ahead:
                self.flow.pause_reading()
            else:  # it was paused at the head
                self.flow.resume_reading()
        if self._in_head:
            self._head_bytes = 0 if self._has_ended else self._head_bytes + len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._end(_TOO_LONG)
            elif self._head_bytes and self._late is None:
                self._late = self.loop.call_later(self._head_s, self._on_late)

    def on_message_begin(self) -> None:
        """A head begins."""
        self.url, self.headers, self.expect_100_continue = b"", [], False

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._in_head = False
        if self._late is not None:
            self._unset_late()
        path = None if self._direct is None else self._direct.targets.get(self.url)
        if path is not None and self.parser.get_method() == b"POST" and self._is_plain:
            self._begin_direct(path)
        else:
            self._begin_ordinary()
        if self._is_last:
            self.cycle.keep_alive = False

    @property
    def _is_plain(self) -> bool:
        return self.parser.get_http_version() == "1.1" and not self.parser.should_upgrade()

    def _begin_direct(self, path: str) -> None:
        before = self.cycle
        client = RequestCycle(
            self,
            path,
            self.headers,
            keep_alive=self.parser.should_keep_alive(),
            expects_continue=self.expect_100_continue,
        )
        self.cycle = client  # type: ignore[assignment]
        if before is None or before.response_complete:
            self._start_asgi_task(client, self.app)
        else:  # pipelined: its turn comes
            self.pipeline.appendleft((client, self.app))  # type: ignore[arg-type]

    @property
    def _is_far_ahead(self) -> bool:
        """Enough is waiting for its turn."""
        waiting = self.pipeline
        return len(waiting) > MAX_AHEAD or sum(len(cycle.body) for cycle, _ in waiting) > MAX_AHEAD_BYTES

    def _begin_ordinary(self) -> None:
        """uvicorn's way; the scope that it makes at the beginning of every head is made here."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.scope["headers"] = self.headers = headers
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """A pipelined request's turn has come."""
        if isinstance(cycle, RequestCycle):
            assert self._direct is not None
            cycle.begin(self._direct.serve)
        else:
            super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        """The request is whole; what comes next is another head."""
        self._in_head = self._has_ended = True
        if self._late is not None:
            self._unset_late()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is sent, and the next request's turn. Should this one not be whole, the rest has as much
        time as a head.
        """
        self.server_state.total_requests += 1
        if self.is_closing or self.transport.is_closing():
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._idle_since_s = self.loop.time()
        if not self._is_far_ahead:
            self.flow.resume_reading()
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
        """Close, with an answer where none is under way; one that is ends here."""
        if self.is_closing or self.transport.is_closing():
            return
        if self._is_answering:
            self.transport.close()
            return
        if answer:
            self.transport.write(answer)
        self.close_in_order()

    def close_in_order(self) -> None:
        """Close, after what was written, a connection whose client may still send."""
        if self.is_closing or self.transport.is_closing():
            return
        self._unset_late()
        if not self.transport.can_write_eof():  # TLS
            self.transport.close()
            return
        self.is_closing = True
        self.transport.write_eof()
        self.flow.resume_reading()
        if self._idle is not None:
            self._idle.cancel()
        self._idle = self.loop.call_later(CLOSING_S, self.transport.abort)

    def _unset_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
