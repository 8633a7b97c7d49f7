"""One request and its answer on a client's connection.

Back-pressure of one connection: when its client sends faster than it is served, or reads too slowly.

What a handler needs of a request and its client, and what a request needs of its connection.

One request on a client's connection, and its answer.

An answer's head is sent together with the first piece of its body: one system call and one packet less.
"""

from __future__ import annotations

import asyncio
import http
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol


class Flow:
    """Both directions of a connection."""

    __slots__ = ("_transport", "_writable", "read_paused", "write_paused")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._writable: asyncio.Event | None = None
        """Somebody waits for it."""
        self.read_paused = False
        self.write_paused = False

    def pause_reading(self) -> None:
        """Take nothing more from the client."""
        if not self.read_paused:
            self.read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Take what the client sends."""
        if self.read_paused:
            self.read_paused = False
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """The client is slow to read."""
        self.write_paused = True

    def resume_writing(self) -> None:
        """The client has read, or has left."""
        self.write_paused = False
        if self._writable is not None:
            self._writable.set()
            self._writable = None

    async def drain(self) -> None:
        """Wait until the client reads, or has left."""
        while self.write_paused:
            if self._writable is None:
                self._writable = asyncio.Event()
            await self._writable.wait()


Headers = list[tuple[bytes, bytes]]


class Client(Protocol):
    """One request and its answer. Attributes are read only."""

    @property
    def method(self) -> str:
        """Of HTTP."""
        ...

    @property
    def path(self) -> str:
        """Without the query."""
        ...

    @property
    def headers(self) -> Headers:
        """Names in lower case."""
        ...

    @property
    def task(self) -> asyncio.Task[Any]:
        """The task that serves the request."""
        ...

    @property
    def address(self) -> str:
        """The client's IP address, or its proxy's; empty where the server does not know it."""
        ...

    async def read(self) -> tuple[bytes, bool] | None:
        """(the next piece of the request's body, whether more follows); None: the client has left."""
        ...

    def start(self, status: int, headers: Headers, length: int | None, *, closes: bool = False) -> None:
        """Begin the answer, whose body has `length` bytes, None: as many as will come. It goes out with the
        first of them. `closes`: the connection ends with the answer.
        """
        ...

    async def write(self, body: bytes, more: bool) -> None:
        """Send a piece of the answer's body; waits while the client is slow to read."""
        ...

    @property
    def takes_now(self) -> bool:
        """`write_now` can be used: the client is there and not slow to read."""
        ...

    def write_now(self, body: bytes) -> None:
        """Send a piece of the answer's body, not the last, without a task's help."""
        ...

    def watch(self, on_gone: Callable[[], None], on_asked: Callable[[], None] | None = None) -> None:
        """Until `unwatch`, call `on_gone` when the client goes away, now if it has. `on_asked` is called when
        an answer has begun and the client sends no more: what is sent then tells whether it still reads.
        """
        ...

    def unwatch(self) -> None:
        """The request is over."""
        ...


class Shared(Protocol):
    """What the connections of a server share."""

    @property
    def default_lines(self) -> bytes:
        """Whole header lines of every answer, like the date."""
        ...


class Wire(Protocol):
    """The connection that carries a request, as `RequestCycle` uses it."""

    loop: asyncio.AbstractEventLoop
    flow: Flow
    transport: asyncio.Transport
    tasks: set[asyncio.Task[Any]]
    """Of the whole server: a graceful stop waits for them."""
    client: tuple[str, int] | None
    """Address and port of the other end."""
    is_closing: bool
    """Nothing is sent any more."""

    @property
    def shared(self) -> Shared:
        """What all connections share."""
        ...

    @property
    def server(self) -> tuple[str, int] | None:
        """Address and port of this end."""
        ...

    @property
    def scheme(self) -> str:
        """`http`, or `https` where TLS is spoken."""
        ...

    def resume_reading(self) -> None:
        """Read on, if enough room is left: whether a client has left is seen only by reading."""
        ...

    def close_in_order(self) -> None:
        """Close after what was written was sent; the client may still send."""
        ...

    def on_response_complete(self) -> None:
        """The answer is sent: the next request's turn."""
        ...


HIGH_WATER_BYTES: Final = 64 * 1024
"""The client is paused when more of its body has come than this, and nobody has read it."""
_PHRASES: Final = {status.value: status.phrase for status in http.HTTPStatus}
STATUS_LINES: Final = {n: f"HTTP/1.1 {n} {_PHRASES.get(n, '')}\r\n".encode() for n in range(100, 600)}
WITHOUT_BODY: Final = frozenset((204, 304))
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_LAST_CHUNK: Final = b"0\r\n\r\n"


class RequestCycle:
    """One request of a connection; see `client.Client` for what has no comment here."""

    __slots__ = (
        "_head",
        "_is_chunked",
        "_on_asked",
        "_on_gone",
        "_serve",
        "_waiter",
        "body",
        "disconnected",
        "expects_continue",
        "headers",
        "keep_alive",
        "method",
        "more_body",
        "path",
        "response_complete",
        "response_started",
        "target",
        "task",
        "version",
        "wire",
    )

    task: asyncio.Task[None]

    def __init__(
        self,
        wire: Wire,
        serve: Callable[[RequestCycle], Coroutine[Any, Any, None]],
        method: str,
        target: bytes,
        path: str,
        headers: Headers,
        *,
        version: str = "1.1",
        keep_alive: bool = True,
        expects_continue: bool = False,
    ) -> None:
        """`target`: as the client wrote it. `path`: empty where only `serve` can tell. `version`: of HTTP."""
        self.wire = wire
        self._serve = serve
        self._head = b""
        self._is_chunked = False
        self._waiter: asyncio.Future[None] | None = None
        self._on_gone: Callable[[], None] | None = None
        self._on_asked: Callable[[], None] | None = None
        self.method = method
        self.target = target
        self.path = path
        self.headers = headers
        self.version = version
        self.keep_alive = keep_alive
        self.expects_continue = expects_continue
        self.body = b""
        """What came of it and was not read."""
        self.more_body = True
        self.disconnected = False
        self.response_started = False
        self.response_complete = False

    def begin(self) -> None:
        """Have the request served, in a task of its own."""
        self.task = self.wire.loop.create_task(self._run())
        self.wire.tasks.add(self.task)

    async def _run(self) -> None:
        try:
            await self._serve(self)
        finally:
            self.wire.tasks.discard(self.task)
            if not (self.response_complete or self.disconnected):
                self.wire.transport.close()

    # --- for the connection

    def receive(self, body: bytes) -> None:
        """A piece of the body has come."""
        if self.response_complete:
            return
        self.body = self.body + body if self.body else body
        if len(self.body) > HIGH_WATER_BYTES:
            self.wire.flow.pause_reading()
        if self._waiter is not None:
            self._wake()

    def receive_end(self) -> None:
        """The body has come to its end."""
        if self.response_complete:
            return
        self.more_body = False
        if self._waiter is not None:
            self._wake()

    def lose(self) -> None:
        """The client has left."""
        if not self.response_complete:
            self.disconnected = True
            self._wake()
        if self._on_gone is not None:
            self._on_gone()

    def ask_client(self) -> bool:
        """Send something that changes no answer, so that the end of a client that has left says so. False:
        nothing can be sent within this answer.
        """
        if not self.response_started:
            self.wire.transport.write(_CONTINUE)
        elif self._on_asked is not None:
            self._on_asked()
        else:
            return False
        return True

    def _wake(self) -> None:
        """There is something new for who waits in `read`."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- for the router

    @property
    def address(self) -> str:
        """The client's IP address, or its proxy's."""
        client = self.wire.client
        return client[0] if client else ""

    async def read(self) -> tuple[bytes, bool] | None:
        """The next piece of the request's body."""
        wire = self.wire
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
        self._is_chunked = False
        lines = [b"%b: %b\r\n" % pair for pair in headers]
        if length is not None:
            lines.append(b"content-length: %d\r\n" % length)
        elif self.version == "1.0":
            self.keep_alive = False  # the end of the connection is the end of the answer
        elif status not in WITHOUT_BODY and self.method != "HEAD":
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        head = b"".join(lines)
        if head.count(b"\n") != len(lines):
            raise ValueError("an answer's header holds the end of a line")
        self._head = b"%b%b%b\r\n" % (STATUS_LINES[status], self.wire.shared.default_lines, head)

    async def write(self, body: bytes, more: bool) -> None:
        """Send a piece of the answer's body."""
        wire = self.wire
        if wire.flow.write_paused and not self.disconnected:
            await wire.flow.drain()
        if self.disconnected or self.response_complete or wire.is_closing:
            return
        data = self._framed(b"" if self.method == "HEAD" else body)
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
        wire = self.wire
        is_closing = wire.is_closing or wire.transport.is_closing()
        return not (wire.flow.write_paused or self.disconnected or is_closing)

    def write_now(self, body: bytes) -> None:
        """Send a piece of the answer's body, not the last and not empty."""
        if self._head or not self._is_chunked:
            body = self._framed(body)
        else:
            body = b"%x\r\n%b\r\n" % (len(body), body)
        self.wire.transport.write(body)

    def _framed(self, body: bytes) -> bytes:
        """What stands before it, with it."""
        head, self._head = self._head, b""
        if not self._is_chunked:
            return head + body
        return b"%b%x\r\n%b\r\n" % (head, len(body), body) if body else head

    def watch(self, on_gone: Callable[[], None], on_asked: Callable[[], None] | None = None) -> None:
        """See `client.Client`."""
        self._on_gone, self._on_asked = on_gone, on_asked
        if self.wire.flow.read_paused:  # for a large body, which was read
            self.wire.resume_reading()
        if self.disconnected:
            on_gone()

    def unwatch(self) -> None:
        """The request is over."""
        self._on_gone = self._on_asked = None
