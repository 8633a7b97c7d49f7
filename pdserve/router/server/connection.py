"""A client's connection: HTTP/1.1 on an asyncio protocol, parsed by httptools, with a limit on every wait.

A client can send nothing at all, send a head drop by drop or without an end, or go on sending a body after
its answer. A connection is in one of these states, and each state has a limit:

| state     | the client                                        | limit              | then               |
|-----------|---------------------------------------------------|--------------------|--------------------|
| idle      | has sent nothing since its last answer            | keep-alive time    | close              |
| head      | has sent part of a head                           | `head_s`           | 408, close in order |
| answering | waits for an answer; sends its body, or pipelines | the handler's      |                    |
| rest      | has its answer, and still sends that request      | `head_s`           | close in order     |
| closing   | has all its answers; what it sends is discarded   | `CLOSING_S`        | abort              |
| gone      |                                                   |                    |                    |

    idle --bytes--> head --head complete--> answering --answer complete--> idle, head or rest
    rest --request complete--> idle
    idle, head, rest, answering --limit exceeded--> closing
    any --connection lost--> gone

A limit starts when its state begins; later bytes do not extend it. So a head that a client sends while an
answer is under way has its time when the answer is complete. A head of more than `MAX_HEAD_BYTES`, or with
more than `MAX_HEADERS` lines, is answered 431. To close in order is to close the sending half only: a client
that still sends gets to read its answer.

In every state, a client that takes nothing for `client_read_s` of what waits to be sent is cut off.

An offer of another protocol is passed over, as RFC 9110 (7.8) allows: Java's client offers `h2c` with the
first request of each connection. llhttp reads no body behind such a head, so the head is parsed again without
the offer.

A client may shut its sending half behind a whole request, and still gets its answer. Whether it has left
altogether is asked by sending it something (`HalfClosed`). Where it cannot be asked, over TLS, in HTTP/1.0
and within an application's own streams, the end of what a client sends is its leaving.

When the server stops, a request may be on its way. So an idle connection stays for `LINGER_S`, and a request
that comes meanwhile is answered with `Connection: close`. The same holds for a connection whose answer has
promised to keep it alive, and for one that was accepted just before.

Pipelined requests are read within `MAX_AHEAD` and `MAX_AHEAD_BYTES` while an answer is under way: whether a
client has left is seen only by reading. What was read at once may hold more of them, up to `MAX_PIPELINED`.
The connection of a client that sends more is closed: each takes some kilobytes, whatever its length.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections import deque
from typing import Any, Final, Literal, cast

import httptools

from pdserve.router.server.connections import Connections
from pdserve.router.server.request_cycle import Flow, RequestCycle

MAX_HEAD_BYTES = 64 * 1024
"""Longest request line and headers; httptools has no bound of its own."""
MAX_HEADERS = 256
"""Each header takes memory of its own: ten thousand short ones took 2 MB."""
MAX_AHEAD = 16
MAX_AHEAD_BYTES = 64 * 1024
MAX_PIPELINED = 64
LINGER_S = 1.0
CLOSING_S = 2.0
_CLOSING: Final = b"content-length: 0\r\nconnection: close\r\n\r\n"
_TOO_LONG: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\n" + _CLOSING
_TOO_LATE: Final = b"HTTP/1.1 408 Request Timeout\r\n" + _CLOSING
_NOT_HTTP: Final = b"HTTP/1.1 400 Bad Request\r\n" + _CLOSING
_OFFER: Final = frozenset((b"upgrade", b"http2-settings"))
"""Headers, and words of `connection`, that offer another protocol."""

State = Literal["idle", "head", "answering", "rest", "closing", "gone"]


class ClientConnection(asyncio.Protocol):
    """One connection of a server."""

    __slots__ = (
        "_cycle",
        "_deadline_s",
        "_expects_continue",
        "_half_closed",
        "_has_offer",
        "_head_bytes",
        "_headers",
        "_parser",
        "_pipeline",
        "_running",
        "_sending",
        "_state",
        "_target",
        "_timer",
        "_unread_bytes",
        "_unread_timer",
        "client",
        "flow",
        "is_closing",
        "loop",
        "shared",
        "tasks",
        "transport",
    )
    transport: asyncio.Transport
    flow: Flow

    def __init__(self, shared: Connections, loop: asyncio.AbstractEventLoop) -> None:
        self.shared = shared
        self.loop = loop
        self.tasks: set[asyncio.Task[Any]] = shared.tasks
        self.client: tuple[str, int] | None = None
        self._parser: Any = self._new_parser()
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._expects_continue = False
        self._running: RequestCycle | None = None
        """The request that is being answered, or the last one."""
        self._cycle: RequestCycle | None = None
        """The request that is being received, or the last one."""
        self._pipeline: deque[RequestCycle] = deque()
        """Those that wait for their turn."""
        self._state: State = "idle"
        self.is_closing = False
        """The state is closing or gone. An attribute, since it is read for every chunk."""
        self._sending: Literal["idle", "head", "rest"] = "idle"
        """What the client sends: the state when no answer is under way."""
        self._head_bytes = 0
        """Received since the last request was complete."""
        self._deadline_s = math.inf
        """When the state's limit is exceeded, on the loop's clock."""
        self._timer: asyncio.TimerHandle | None = None
        """Fires at the deadline or before. A timer for each limit would cost more than it is worth."""
        self._unread_timer: asyncio.TimerHandle | None = None
        """Runs while the client is behind with its reading."""
        self._unread_bytes = 0
        """What waited to be sent when that timer was set."""
        self._has_offer = False
        """The head that is complete offers another protocol, and is to be parsed again without it."""
        self._half_closed: HalfClosed | None = None
        """The client sends no more, and gets the answers to what it has sent."""

    def _new_parser(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        # a client may send more behind its last request: that one is answered nevertheless
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    # --- the state

    @property
    def is_answering(self) -> bool:
        """A request waits for its answer, or for its end."""
        return self._cycle is not None and not self._cycle.response_complete

    def _update(self) -> None:
        """Take the state that `_cycle` and `_sending` say."""
        cycle = self._cycle
        if cycle is not None and not cycle.response_complete:
            if self._state != "answering" and not self.is_closing:
                self._state, self._deadline_s = "answering", math.inf
        elif self._sending != self._state and not self.is_closing:
            self._enter(self._sending)

    def _enter(self, state: State) -> None:
        """Enter a state that has a limit, or `gone`."""
        self._state = state
        if state == "gone":
            self.is_closing = True
            return
        if state == "closing":
            self.is_closing = True
            limit_s = CLOSING_S
        elif self.shared.is_stopping:
            limit_s = LINGER_S
        else:
            limit_s = self.shared.keep_alive_s if state == "idle" else self.shared.head_s
        self._deadline_s = self.loop.time() + limit_s
        if self._timer is None or self._deadline_s < self._timer.when():
            self._arm(limit_s)

    def _arm(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        left_s = self._deadline_s - self.loop.time()
        if left_s > 0:
            self._arm(min(left_s, self.shared.keep_alive_s))
        elif self._state == "head":
            self._refuse(_TOO_LATE)
        elif self._state == "rest":
            self.close_in_order()
        elif self._state == "closing":
            self.transport.abort()
        else:
            self.transport.close()
            self._watch_unread()

    # --- a client that does not read

    def pause_writing(self) -> None:
        """Too much waits to be sent."""
        self.flow.pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        """The client has taken most of it."""
        self.flow.resume_writing()
        if not self.transport.is_closing():
            self._forget_unread()

    def _watch_unread(self) -> None:
        """Cut the connection once the client takes nothing for its time, if something waits to be sent."""
        if (
            self._unread_timer is None
            and self._state != "gone"
            and (unread := self.transport.get_write_buffer_size())
        ):
            self._unread_bytes = unread
            self._unread_timer = self.loop.call_later(self.shared.client_read_s, self._on_unread)

    def _on_unread(self) -> None:
        self._unread_timer = None
        if self.transport.get_write_buffer_size() < self._unread_bytes:
            self._watch_unread()
        else:
            self.transport.abort()

    def _forget_unread(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    # --- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The client's connection stands."""
        self.transport = cast("asyncio.Transport", transport)
        self.flow = Flow(self.transport)
        self.client = _address(transport.get_extra_info("peername"))
        self.shared.connections.add(self)  # type: ignore[arg-type]  # of which uvicorn uses `shutdown`
        self._enter("idle")
        address = self.client[0] if self.client else ""
        goes = self.shared.connection_limit.came(self, address, lambda one: not one.is_answering)
        if goes is not None:
            goes.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        if self._timer is not None:
            self._timer.cancel()
        if self._half_closed is not None:
            self._half_closed.stop()
        self._forget_unread()
        self.shared.connection_limit.left(self)
        self.shared.connections.discard(self)
        self._enter("gone")
        if self._running is not None:
            self._running.lose()
        self.flow.resume_writing()
        # these and the connection hold each other, and the garbage collector runs seldom
        self._parser = self._cycle = self._running = None
        self._pipeline.clear()

    @property
    def server(self) -> tuple[str, int] | None:
        """Address and port of this end."""
        return _address(self.transport.get_extra_info("sockname"))

    @property
    def scheme(self) -> str:
        """`http`, or `https` where TLS is spoken."""
        return "https" if self.transport.get_extra_info("sslcontext") else "http"

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if self.is_closing:
            return
        if self._sending == "idle":
            self._sending = "head"
        self._head_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self.shared.log.warning("not HTTP", "a client sent what is no HTTP request: %s", error)
            self._refuse(_NOT_HTTP)
        if self._pipeline and self._is_far_ahead and not self.transport.is_closing():
            self.flow.pause_reading()
        if self._sending == "head" and (
            self._head_bytes > MAX_HEAD_BYTES or len(self._headers) > MAX_HEADERS
        ):
            self._refuse(_TOO_LONG)
            self._headers = []
        self._update()

    def _feed(self, data: bytes) -> None:
        """Parse `data`. Raises HttpParserError."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = data[upgrade.args[0] :]
            if not self._has_offer:
                return
            data = self._head_without_offer() + rest

    def _head_without_offer(self) -> bytes:
        """The head that was parsed last, for a new parser: the old one has no more to do with HTTP."""
        self._has_offer = False
        lines = [b"%b %b HTTP/%b\r\n" % (self._parser.get_method(), self._target, self._version)]
        for name, value in self._headers:
            if name == b"connection":
                words = (word.strip() for word in value.split(b","))
                value = b", ".join(word for word in words if word.lower() not in _OFFER)
            if name not in _OFFER and (value or name != b"connection"):
                lines.append(b"%b: %b\r\n" % (name, value))
        self._parser = self._new_parser()
        return b"".join((*lines, b"\r\n"))

    @property
    def _version(self) -> bytes:
        version: str = self._parser.get_http_version()
        return version.encode("ascii")

    def eof_received(self) -> bool:
        """The client sends no more. True: the connection stays, for the answers to whole requests."""
        running = self._running
        if (
            running is None
            or not self.is_answering
            or self._sending != "idle"
            or self.is_closing
            or running.version == "1.0"
            or not is_tcp(self.transport)
        ):
            return False
        if self._half_closed is None:
            if not running.ask_client():
                return False
            self._half_closed = HalfClosed(self.transport, self.loop)
        if self._cycle is not None and not self._cycle.response_started:
            self._cycle.keep_alive = False
        return True

    @property
    def _is_far_ahead(self) -> bool:
        """Enough is waiting for its turn."""
        waiting = self._pipeline
        return len(waiting) > MAX_AHEAD or sum(len(cycle.body) for cycle in waiting) > MAX_AHEAD_BYTES

    def shutdown(self) -> None:
        """The server stops: the next answer here is the last."""
        if not self.is_answering:
            if not self.is_closing:
                self._enter(self._state)
        elif self._cycle is not None and not self._cycle.response_started:
            self._cycle.keep_alive = False

    def _refuse(self, answer: bytes) -> None:
        """Close with this answer; if another one is under way, cut that off."""
        if self.is_closing or self.transport.is_closing():
            return
        if self.is_answering:
            self.transport.close()
            self._watch_unread()
            return
        self.transport.write(answer)
        self.close_in_order()

    def close_in_order(self) -> None:
        """Close after what was written was sent; the client may still send."""
        if self.is_closing or self.transport.is_closing():
            return
        if not self.transport.can_write_eof():  # TLS
            self.transport.close()
            self._watch_unread()
            return
        self.transport.write_eof()
        self.flow.resume_reading()
        self._enter("closing")

    # --- for the request

    def resume_reading(self) -> None:
        """Read on, if enough room is left: whether a client has left is seen only by reading."""
        if not self._is_far_ahead:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """The answer is sent: the next request's turn."""
        self.shared.total_requests += 1
        if self.is_closing or self.transport.is_closing():
            self._watch_unread()
            return
        if self._pipeline:
            self._begin(self._pipeline.popleft())
        elif self._half_closed is not None:
            self.transport.close()
            self._watch_unread()
            return
        if self.flow.read_paused:
            self.resume_reading()
        self._update()

    def _begin(self, cycle: RequestCycle) -> None:
        self._running = cycle
        cycle.begin()

    # --- httptools

    def on_message_begin(self) -> None:
        """A head begins."""
        self._sending = "head"
        self._target, self._headers, self._expects_continue = b"", [], False

    def on_url(self, url: bytes) -> None:
        """A part of the request's target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header line. A trailer is passed over: it would override what others have checked."""
        if self._sending == "rest" or len(self._headers) > MAX_HEADERS:
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is complete."""
        if self.transport.is_closing():
            return  # the rest of what was read at once
        if len(self._headers) > MAX_HEADERS or len(self._pipeline) >= MAX_PIPELINED:
            self._refuse(_TOO_LONG)
            return
        parser, shared, target = self._parser, self.shared, self._target
        method, version = parser.get_method(), parser.get_http_version()
        if parser.should_upgrade():
            self._has_offer = method != b"CONNECT"
            if method == b"CONNECT":
                self._refuse(_NOT_HTTP)
            return
        self._sending = "rest"
        path = shared.targets.get(target)
        if path is None:
            path = shared.find(httptools.parse_url(target).path)  # raises for what is no URL: 400
        keep_alive = version == "1.1" and parser.should_keep_alive()
        before = self._cycle
        self._cycle = cycle = RequestCycle(
            self,
            shared.application.serve if path is None else shared.serve_directly,
            method.decode("ascii"),
            target,
            path or "",
            self._headers,
            version=version,
            keep_alive=keep_alive and not shared.is_stopping,
            expects_continue=self._expects_continue,
        )
        if before is None or before.response_complete:
            self._begin(cycle)
        else:  # pipelined: its turn comes
            self._pipeline.append(cycle)

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        if self._cycle is not None and self._sending == "rest" and not self.is_closing:
            self._cycle.receive(body)

    def on_message_complete(self) -> None:
        """The request is complete. What comes next is another head, and not counted with this one."""
        if self.is_closing or self._has_offer:
            return
        if self._cycle is not None and self._sending == "rest":
            self._cycle.receive_end()
        self._sending, self._head_bytes = "idle", 0


def _address(given: Any) -> tuple[str, int] | None:
    """IP address and port; None where the socket has none."""
    return (str(given[0]), int(given[1])) if isinstance(given, tuple) else None


FIRST_LOOK_S: Final = 0.02
SLOWEST_LOOK_S: Final = 1.0
_CLOSED: Final = 7
"""TCP_CLOSE of Linux' tcp_states.h; it stands in the first byte of TCP_INFO."""


def is_tcp(transport: asyncio.Transport) -> bool:
    """Whether the peer of this transport can be asked: by TCP, and without TLS, which closes both halves."""
    sock = transport.get_extra_info("socket")
    is_plain = transport.get_extra_info("sslcontext") is None
    return sock is not None and is_plain and sock.family in (socket.AF_INET, socket.AF_INET6)


class HalfClosed:
    """A client that has shut the sending half of its connection: does it wait for its answer, or has it left?

    TCP says the same in both cases, until something is sent. A client that waits takes it; the system of one
    that has closed its socket answers with a reset. So the connection sends what changes no answer (`100
    Continue`, or a comment in a stream of events), and this looks for the reset: nothing is read any more
    that would tell. It looks more and more seldom, and aborts the connection that was reset.
    """

    __slots__ = ("_delay_s", "_loop", "_timer", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._delay_s = FIRST_LOOK_S
        self._timer = loop.call_later(FIRST_LOOK_S, self._look)

    def stop(self) -> None:
        """The connection is over."""
        self._timer.cancel()

    def _look(self) -> None:
        sock = self._transport.get_extra_info("socket")
        if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSED:
            self._transport.abort()
            return
        self._delay_s = min(2 * self._delay_s, SLOWEST_LOOK_S)
        self._timer = self._loop.call_later(self._delay_s, self._look)
