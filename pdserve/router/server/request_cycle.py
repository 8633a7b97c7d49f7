"""A request on a hot route, straight between the connection and the router.

uvicorn's way from a parsed head to the application and back (a scope, messages in dictionaries, an event, a
check of every header by pattern, a system call for the head alone) was a fifth of what a request costs here.
`RequestCycle` stands where uvicorn's protocol has a `RequestResponseCycle`, under the names that it uses
there, so pipelining, back-pressure, keep-alive and the stop stay uvicorn's; the body's framing and the answer
are written here. It serves what the hot routes are made for, a POST by HTTP/1.1 to exactly their path;
anything else goes uvicorn's way.

An answer's head is sent together with the first piece of its body: one system call and one packet less.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from pdserve.router.server.client import Headers, Wire

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


class RequestCycle:
    """One POST on a connection of uvicorn's; see `client.Client` for what has no comment here."""

    __slots__ = (
        "_head",
        "_is_chunked",
        "_task",
        "_waiter",
        "_wire",
        "body",
        "disconnected",
        "expects_continue",
        "headers",
        "keep_alive",
        "more_body",
        "path",
        "response_complete",
        "response_started",
    )
    method = "POST"

    def __init__(
        self,
        wire: Wire,
        path: str,
        headers: Headers,
        *,
        keep_alive: bool,
        expects_continue: bool,
    ) -> None:
        self._wire = wire
        self._head = b""
        self._is_chunked = False
        self._task: asyncio.Task[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.path = path
        self.headers = headers
        self.keep_alive = keep_alive
        self.expects_continue = expects_continue
        self.body = b""
        """What came of it and was not read."""
        self.more_body = True
        self.disconnected = False
        self.response_started = False
        self.response_complete = False

    def begin(self, serve: Callable[[RequestCycle], Coroutine[Any, Any, None]]) -> None:
        """Have the request served, in a task of its own."""
        self._task = self._wire.loop.create_task(self._run(serve))
        self._wire.tasks.add(self._task)

    async def _run(self, serve: Callable[[RequestCycle], Coroutine[Any, Any, None]]) -> None:
        try:
            await serve(self)
        finally:
            assert self._task is not None
            self._wire.tasks.discard(self._task)
            if not (self.response_complete or self.disconnected):
                self._wire.transport.close()

    # --- for the connection

    def receive(self, body: bytes) -> None:
        """A piece of the body has come; above 64 KiB that nobody has read, the client is paused."""
        if self.response_complete:
            return
        self.body = self.body + body if self.body else body
        if len(self.body) > HIGH_WATER_LIMIT:
            self._wire.flow.pause_reading()
        if self._waiter is not None:
            self.set()

    def receive_end(self) -> None:
        """The body has come to its end."""
        if self.response_complete:
            return
        self.more_body = False
        if self._waiter is not None:
            self.set()

    @property
    def message_event(self) -> RequestCycle:
        """What uvicorn's protocol sets when the connection is lost."""
        return self

    def set(self) -> None:
        """There is something new for who waits in `read`."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- for the router

    @property
    def address(self) -> str:
        """The client's IP address, or its proxy's."""
        client = self._wire.client
        return client[0] if client else ""

    async def read(self) -> tuple[bytes, bool] | None:
        """The next piece of the request's body."""
        wire = self._wire
        if self.expects_continue and not wire.transport.is_closing():
            self.expects_continue = False
            wire.transport.write(_CONTINUE)
        while not self.body and self.more_body and not self.disconnected:
            wire.flow.resume_reading()
            self._waiter = wire.loop.create_future()
            await self._waiter
        if self.disconnected:
            return None
        body, self.body = self.body, b""
        return body, self.more_body

    def start(self, status: int, headers: Headers, length: int | None, *, closes: bool = False) -> None:
        """Begin the answer. Raises ValueError for a header that would be more than one."""
        self.response_started = True
        self.expects_continue = False
        if closes:
            self.keep_alive = False
        lines = [b"%b: %b\r\n" % pair for pair in headers]
        self._is_chunked = length is None
        if length is None:
            lines.append(b"transfer-encoding: chunked\r\n")
        else:
            lines.append(b"content-length: %d\r\n" % length)
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        head = b"".join(lines)
        if head.count(b"\n") != len(lines):
            raise ValueError("an answer's header holds the end of a line")
        self._head = b"%b%b%b\r\n" % (STATUS_LINE[status], self._wire.server_state.default_lines, head)

    async def write(self, body: bytes, more: bool) -> None:
        """Send a piece of the answer's body."""
        wire = self._wire
        if wire.flow.write_paused and not self.disconnected:
            await wire.flow.drain()
        if self.disconnected or self.response_complete or wire.is_closing:
            return
        data = self._framed(body)
        if self._is_chunked and not more:
            data += _LAST_CHUNK
        wire.transport.write(data)
        if not more:
            self.response_complete = True
            if not self.keep_alive:
                if self.more_body:
                    wire.close_in_order()
                else:
                    wire.transport.close()
            wire.on_response_complete()

    @property
    def takes_now(self) -> bool:
        """Nothing is to be waited for."""
        wire = self._wire
        is_closing = wire.is_closing or wire.transport.is_closing()
        return not (wire.flow.write_paused or self.disconnected or is_closing)

    def write_now(self, body: bytes) -> None:
        """Send a piece of the answer's body, not the last and not empty."""
        if self._head or not self._is_chunked:
            body = self._framed(body)
        else:
            body = b"%x\r\n%b\r\n" % (len(body), body)
        self._wire.transport.write(body)

    def _framed(self, body: bytes) -> bytes:
        """What stands before it, with it."""
        head, self._head = self._head, b""
        if not self._is_chunked:
            return head + body
        return b"%b%x\r\n%b\r\n" % (head, len(body), body) if body else head

    def watch(self, on_gone: Callable[[], None]) -> None:
        """The connection knows when its client goes."""
        self._wire.watch(on_gone)

    def unwatch(self) -> None:
        """The request is over."""
        self._wire.unwatch()
