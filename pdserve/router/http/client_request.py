"""One request of a client's connection, and its answer; and the connection as its requests see it."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Final

from pdserve.router.http.connections import Connections
from pdserve.router.http.driven import Driven
from pdserve.router.http.lost_clients import Unread

HIGH_WATER_BYTES: Final = 64 * 1024
"""The client is paused when more of its body has come than this, and nobody has read it."""
STATUS_LINES: Final = {
    **{number: b"HTTP/1.1 %d \r\n" % number for number in range(100, 600)},
    **{one.value: f"HTTP/1.1 {one.value} {one.phrase}\r\n".encode() for one in HTTPStatus},
}
WITHOUT_BODY: Final = frozenset((204, 304))
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
Headers = list[tuple[bytes, bytes]]


class Channel(asyncio.Protocol):
    """A connection as its requests see it: where the other end is, and back-pressure in both directions."""

    __slots__ = (
        "_unread", "_writable", "client", "is_closing", "is_full", "is_reading", "loop", "shared",
        "shown", "transport",
    )  # fmt: skip
    transport: asyncio.Transport
    _unread: Unread

    def __init__(self, shared: Connections, loop: asyncio.AbstractEventLoop) -> None:
        self.shared = shared
        self.loop = loop
        self.client: tuple[str, int] | None = None
        """Address and port of the other end."""
        self.is_closing = False
        """Nothing is sent any more. An attribute, since it is read for every chunk."""
        self.is_full = False
        """The client is slow to read."""
        self._writable: asyncio.Event | None = None
        """Somebody waits until it has read."""
        self.is_reading = True
        self.shown: tuple[bytes, object, Any] = b"", None, None
        """What the last request showed of its client, the keys that there were then, and whose it was."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self.transport = transport  # type: ignore[assignment]  # of a stream
        self.client = _address(transport.get_extra_info("peername"))
        self._unread = Unread(self.transport, self.loop, self.shared.client_read_s)

    @property
    def server(self) -> tuple[str, int] | None:
        """Address and port of this end."""
        return _address(self.transport.get_extra_info("sockname"))

    @property
    def scheme(self) -> str:
        """`http`, or `https` where TLS is spoken."""
        return "https" if self.transport.get_extra_info("sslcontext") else "http"

    def pause_writing(self) -> None:
        """Too much waits to be sent."""
        self.is_full = True
        self._unread.watch()

    def resume_writing(self) -> None:
        """The client has taken most of it, or has left."""
        self.is_full = False
        if self._writable is not None:
            self._writable.set()
            self._writable = None
        if not self.transport.is_closing():
            self._unread.forget()

    async def drained(self) -> None:
        """Wait until the client reads, or has left."""
        while self.is_full:
            if self._writable is None:
                self._writable = asyncio.Event()
            await self._writable.wait()

    def pause_reading(self) -> None:
        """Take nothing more from the client."""
        if self.is_reading:
            self.is_reading = False
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Take what the client sends."""
        if not self.is_reading:
            self.is_reading = True
            self.transport.resume_reading()

    def read_on(self) -> None:
        """Read, if enough room is left: whether a client has left is seen only by reading."""
        raise NotImplementedError

    def on_response_complete(self, request: ClientRequest) -> None:
        """The answer is sent: the next request's turn."""
        raise NotImplementedError


class ClientRequest(Driven):
    """One request of a connection, and its answer, whose head is sent with the first piece of its body: one
    system call and one packet less.
    """

    __slots__ = (
        "_head", "_is_chunked", "body", "connection", "has_chunks", "has_head", "headers",
        "is_complete", "is_gone", "is_told_to_go_on", "keep_alive", "method", "more_body", "path",
        "version", "waiter",
    )  # fmt: skip
    _head: bytes
    """Made by `start`, sent with the first piece of the body."""
    _is_chunked: bool
    has_chunks: bool
    """The head was sent, and what follows goes in chunks."""
    body: bytes
    """What came of it and was not read."""
    more_body: bool
    """More of it follows."""
    has_head: bool
    """The answer has begun."""
    is_complete: bool
    """The answer's last byte was sent."""
    version: str
    """Of HTTP."""
    keep_alive: bool
    is_told_to_go_on: bool
    """Who waits for `100 Continue` before its body was sent it."""
    is_gone: bool
    """The client has left."""
    waiter: asyncio.Future[None] | None
    """Somebody waits for more of the body."""

    def __init__(
        self, connection: Channel, method: bytes, target: bytes, path: str, headers: Headers
    ) -> None:
        """`path`: empty where only the ordinary routes can tell, from `target`, as the client wrote it.
        `headers`: names in lower case.
        """
        super().__init__()
        self.connection = connection
        self.method = method
        self.path = path
        self.headers = headers
        self.version, self.body, self.waiter = "1.1", b"", None
        self.keep_alive = self.more_body = True
        self.is_told_to_go_on = self.is_gone = self.has_head = self.is_complete = False
        self._is_chunked = self.has_chunks = False

    def begin(self) -> None:
        """Have the request served."""
        raise NotImplementedError

    def cancel(self, msg: str = "") -> None:
        """The server stops, and its patience is over; as asyncio.Task has it."""
        raise NotImplementedError

    # --- for the connection

    def receive(self, body: bytes) -> None:
        """A piece of the body has come."""
        if self.is_complete:
            return
        self.body = self.body + body if self.body else body
        if len(self.body) > HIGH_WATER_BYTES:
            self.connection.pause_reading()
        if self.waiter is not None:
            self._wake()

    def receive_end(self) -> None:
        """The body has come to its end, and somebody waits for that."""
        self._wake()

    def lose(self) -> None:
        """The client has left."""
        if not self.is_complete:
            self.is_gone = True
            self._wake()
        self.on_gone()

    def on_gone(self) -> None:
        """Tell whoever serves the request that the client has left, which may have its answer."""

    def on_writable(self) -> None:
        """The client reads again."""

    def ask_client(self) -> bool:
        """Send something that changes no answer, so that the end of a client that has left says so. False:
        nothing can be sent within this answer.
        """
        if self.has_head:
            return self.ask_within_answer()
        self.connection.transport.write(_CONTINUE)
        return True

    def ask_within_answer(self) -> bool:
        """The same, where the answer has begun."""
        return False

    def _wake(self) -> None:
        """There is something new for who waits in `read`."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    # --- for who serves it

    @property
    def address(self) -> str:
        """The client's IP address, or its proxy's; empty where the server does not know it."""
        client = self.connection.client
        return client[0] if client else ""

    async def read(self) -> tuple[bytes, bool] | None:
        """(the next piece of the request's body, whether more follows); None: the client has left."""
        connection = self.connection
        if not (self.is_told_to_go_on or self.has_head) and not connection.transport.is_closing():
            self.is_told_to_go_on = True
            if any(name == b"expect" and said.lower() == b"100-continue" for name, said in self.headers):
                connection.transport.write(_CONTINUE)
        while not self.body and self.more_body and not self.is_gone:
            connection.resume_reading()
            self.waiter = connection.loop.create_future()
            await self.waiter
        if self.is_gone:
            return None
        body, self.body = self.body, b""
        return body, self.more_body

    def start(self, status: int, lines: bytes, length: int | None, *, closes: bool = False) -> None:
        """Begin the answer, whose body has `length` bytes, None: as many as will come. It goes out with the
        first of them. `lines`: those of the head, each ended by CRLF. `closes`: the connection ends with the
        answer.
        """
        self.has_head = True
        if closes:
            self.keep_alive = False
        if length is not None:
            lines += b"content-length: %d\r\n" % length
        elif self.version == "1.0":
            self.keep_alive = False  # the end of the connection is the end of the answer
        elif status not in WITHOUT_BODY and self.method != b"HEAD":
            self._is_chunked = True
            lines += b"transfer-encoding: chunked\r\n"
        end = b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
        self._head = STATUS_LINES[status] + self.connection.shared.default_lines + lines + end

    @property
    def takes_now(self) -> bool:
        """`send` need not wait: the client is there and not slow to read."""
        connection = self.connection
        is_closing = connection.is_closing or connection.transport.is_closing()
        return not (connection.is_full or self.is_gone or is_closing)

    def send(self, body: bytes, *, more: bool) -> None:
        """Send a piece of the answer's body, whether or not the client `takes_now`."""
        connection = self.connection
        if self.is_gone or self.is_complete or connection.is_closing:
            return
        head, self._head = self._head, b""
        if self.method == b"HEAD":
            body = b""
        if not self._is_chunked:
            data = head + body
        else:
            self.has_chunks = True
            if body:
                head = b"%b%x\r\n%b\r\n" % (head, len(body), body)
            data = head if more else head + b"0\r\n\r\n"
        connection.transport.write(data)
        if not more:
            self.is_complete = True
            connection.on_response_complete(self)

    async def write(self, body: bytes, *, more: bool) -> None:
        """`send`, once the client is not slow to read."""
        if self.connection.is_full and not self.is_gone:
            await self.connection.drained()
        self.send(body, more=more)


def _address(given: Any) -> tuple[str, int] | None:
    """IP address and port; None where the socket has none."""
    return (str(given[0]), int(given[1])) if isinstance(given, tuple) else None
