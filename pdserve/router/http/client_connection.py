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

A request whose head is complete is begun when what was read with it is parsed: of a short one the body is
there then. It is served without a task (`driven`) where the router answers it, else by the ordinary routes.

Pipelined requests are read within `MAX_AHEAD` and `MAX_AHEAD_BYTES` while an answer is under way: whether a
client has left is seen only by reading. What was read at once may hold more of them, up to `MAX_PIPELINED`.
The connection of a client that sends more is closed: each takes some kilobytes, whatever its length.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Literal

import httptools

from pdserve.router.http.client_request import HIGH_WATER_BYTES, Channel, ClientRequest, Headers
from pdserve.router.http.connections import Connections
from pdserve.router.http.lost_clients import HalfClosed, is_tcp
from pdserve.router.native.heads import HeaderLines

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


class ClientConnection(Channel):
    """One connection of a server."""

    __slots__ = (
        "_deadline_s", "_feed", "_half_closed", "_has_offer", "_head", "_head_bytes", "_headers", "_last",
        "_parser", "_pipeline", "_running", "_sending", "_state", "_target", "_timer", "_unbegun", "_urls",
        "on_header", "on_message_begin", "on_url",
    )  # fmt: skip

    def __init__(self, shared: Connections, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(shared, loop)
        self._head = HeaderLines(MAX_HEADERS)
        self._urls: list[bytes] = []
        """Parts of the next request's target."""
        self.on_message_begin = self._head.begin
        self.on_url = self._urls.append
        self.on_header = self._head.add
        self._parser: Any = self._new_parser()
        self._feed: Any = self._parser.feed_data
        self._target = b""
        self._headers: Headers = []
        """Of the last head that was complete and offers another protocol."""
        self._running: ClientRequest | None = None
        """The request that is being answered."""
        self._last: ClientRequest | None = None
        """The last request whose head has come, until it is answered."""
        self._unbegun = False
        """`_running` is to be begun when all is parsed that was read with its head."""
        self._pipeline: deque[ClientRequest] = deque()
        """Those that wait for their turn."""
        self._state: State = "idle"
        self._sending: Literal["idle", "head", "rest"] = "idle"
        """What the client sends: the state when no answer is under way."""
        self._head_bytes = 0
        """Received since the last request was complete."""
        self._deadline_s = math.inf
        """When the state's limit is exceeded, on the loop's clock."""
        self._timer: asyncio.TimerHandle | None = None
        """Fires at the deadline or before. A timer for each limit would cost more than it is worth."""
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
        return self._last is not None and not self._last.is_complete

    def _update(self) -> None:
        """Take the state that `_last` and `_sending` say."""
        last = self._last
        if last is not None and not last.is_complete:
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

    # --- back-pressure

    def resume_writing(self) -> None:
        """The client has taken most of it, or has left."""
        super().resume_writing()
        if self._running is not None and not self.transport.is_closing():
            self._running.on_writable()

    def read_on(self) -> None:
        """Read, if enough room is left: whether a client has left is seen only by reading."""
        if not (self.is_reading or self._is_far_ahead):
            self.resume_reading()

    def _watch_unread(self) -> None:
        if self._state != "gone":
            self._unread.watch()

    # --- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        super().connection_made(transport)
        self.shared.connections.add(self)  # type: ignore[arg-type]  # uvicorn knows its own
        self._enter("idle")
        address = "" if self.client is None else self.client[0]
        beyond = self.shared.connection_limit.came(self, address, lambda one: not one.is_answering)
        if beyond is not None:
            beyond.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        if self._timer is not None:
            self._timer.cancel()
        if self._half_closed is not None:
            self._half_closed.stop()
        self._unread.forget()
        self.shared.connection_limit.left(self)
        self.shared.connections.discard(self)
        self._enter("gone")
        running = self._running
        # these and the connection hold each other, and the garbage collector runs seldom
        self._parser = self._feed = self._last = self._running = None
        self._pipeline.clear()
        if running is not None:
            running.lose()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if self.is_closing:
            return
        if self._sending == "idle":
            self._sending = "head"
        try:
            self._feed(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._pass_over_offer(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self.shared.log.warning("not HTTP", "a client sent what is no HTTP request: %s", error)
            self._refuse(_NOT_HTTP)
        running = self._running
        # the parser's callbacks have ended the request, nearly always
        if self._sending != "idle" or self._head.is_open or self._pipeline:  # type: ignore[comparison-overlap]
            self._bound(len(data))
        if self._unbegun and running is not None:
            self._unbegun = False
            if not self.is_closing:
                self._state, self._deadline_s = "answering", math.inf
                running.begin()
                return
        self._update()

    def _bound(self, size: int) -> None:
        """Bound what is taken in ahead, and heads without an end. `size`: of what was read just now."""
        if self._pipeline and self._is_far_ahead and not self.transport.is_closing():
            self.pause_reading()
        if self._sending != "idle":
            self._head_bytes += size
        elif self._head.is_open:  # the parser's callbacks have ended a request: another head, behind it
            self._sending = "head"
        if self._sending == "head" and (self._head_bytes > MAX_HEAD_BYTES or self._head.count > MAX_HEADERS):
            self._refuse(_TOO_LONG)
            self._head.take()

    def _pass_over_offer(self, rest: bytes) -> None:
        """Parse the last head again without its offer of another protocol, and what stands behind it."""
        while self._has_offer:
            data = self._head_without_offer() + rest
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = data[upgrade.args[0] :]
            except httptools.HttpParserError:
                self._refuse(_NOT_HTTP)
                return

    def _head_without_offer(self) -> bytes:
        """The head that was parsed last, for a new parser: the old one has no more to do with HTTP."""
        self._has_offer = False
        version = self._parser.get_http_version().encode("ascii")
        lines = [b"%b %b HTTP/%b\r\n" % (self._parser.get_method(), self._target, version)]
        for name, value in self._headers:
            if name == b"connection":
                words = (word.strip() for word in value.split(b","))
                value = b", ".join(word for word in words if word.lower() not in _OFFER)
            if name not in _OFFER and (value or name != b"connection"):
                lines.append(b"%b: %b\r\n" % (name, value))
        self._parser = self._new_parser()
        self._feed = self._parser.feed_data
        return b"".join((*lines, b"\r\n"))

    def eof_received(self) -> bool:
        """The client sends no more. True: the connection stays, for the answers to whole requests."""
        running, last = self._running, self._last
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
        if last is not None and not last.has_head:
            last.keep_alive = False
        return True

    @property
    def _is_far_ahead(self) -> bool:
        """Enough is waiting for its turn."""
        waiting = self._pipeline
        return len(waiting) > MAX_AHEAD or sum(len(request.body) for request in waiting) > MAX_AHEAD_BYTES

    def shutdown(self) -> None:
        """The server stops: the next answer here is the last."""
        last = self._last
        if last is None or last.is_complete:
            if not self.is_closing:
                self._enter(self._state)
        elif not last.has_head:
            last.keep_alive = False

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
        self.resume_reading()
        self._enter("closing")

    # --- the requests

    def _begin(self) -> None:
        """The turn of a request whose head has come."""
        self._unbegun = False
        if self._running is not None and not self.is_closing:
            self._running.begin()

    def _begin_next(self) -> None:
        if self._unbegun:
            self._begin()

    def on_response_complete(self, request: ClientRequest) -> None:
        """The answer is sent: the next request's turn."""
        if not request.keep_alive:
            if request.more_body:
                self.close_in_order()
            else:
                self.transport.close()
        if self.is_closing or self.transport.is_closing():
            self._watch_unread()
            return
        if self._last is request:
            self._last = None
        self._running = None  # its body and the rest of it are not kept while the connection is idle
        if self._pipeline:  # not here: requests that fail at once would begin each other ever deeper
            self._running, self._unbegun = self._pipeline.popleft(), True
            self.loop.call_soon(self._begin_next)
        elif self._half_closed is not None:
            self.transport.close()
            self._watch_unread()
            return
        if not self.is_reading:
            self.read_on()
        if self._sending != "idle" or self._unbegun or self.shared.is_stopping:
            self._update()
        else:  # the timer fires by then: no limit is longer
            self._state, self._deadline_s = "idle", self.loop.time() + self.shared.keep_alive_s

    # --- httptools

    def on_headers_complete(self) -> None:
        """The head is complete."""
        headers, urls = self._head.take(), self._urls
        target = urls.pop()
        if urls:
            target = b"".join((*urls, target))
            urls.clear()
        parser, shared = self._parser, self.shared
        if parser.should_upgrade() or self._pipeline or len(headers) > MAX_HEADERS:
            if self._is_refused(target, headers):
                return
        elif self.transport.is_closing():
            return  # the rest of what was read at once
        self._sending = "rest"
        make, path = shared.proxied, shared.targets.get(target)
        if path is None:
            make, path = self._route(target)
        request = make(self, parser.get_method(), target, path, headers)
        version = parser.get_http_version()
        if version != "1.1":
            request.version = version
            request.keep_alive = False
        elif shared.is_stopping or not parser.should_keep_alive():
            request.keep_alive = False
        before, self._last = self._last, request
        if before is None or before.is_complete:
            self._running, self._unbegun = request, True
        else:  # pipelined: its turn comes
            self._pipeline.append(request)

    def _route(self, target: bytes) -> tuple[Callable[..., ClientRequest], str]:
        """Who makes the request, and its path. Raises HttpParserError for what is no URL: 400."""
        path = self.shared.find(httptools.parse_url(target).path)
        return (self.shared.ordinary, "") if path is None else (self.shared.proxied, path)

    def _is_refused(self, target: bytes, headers: Headers) -> bool:
        """A head that is too long, comes too far ahead or offers another protocol is no request, or not
        yet.
        """
        if self.transport.is_closing():
            return True
        if len(headers) > MAX_HEADERS or len(self._pipeline) >= MAX_PIPELINED:
            self._refuse(_TOO_LONG)
            return True
        if not self._parser.should_upgrade():
            return False
        self._has_offer = self._parser.get_method() != b"CONNECT"
        self._target, self._headers = target, headers
        if not self._has_offer:
            self._refuse(_NOT_HTTP)
        return True

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        last = self._last
        if last is not None and self._sending == "rest" and not self.is_closing:
            if last.body or last.waiter is not None or len(body) > HIGH_WATER_BYTES:
                last.receive(body)
            elif not last.is_complete:
                last.body = body  # nearly always all of it

    def on_message_complete(self) -> None:
        """The request is complete. What comes next is another head, and not counted with this one."""
        if self.is_closing or self._has_offer:
            return
        last = self._last
        if last is not None and self._sending == "rest" and not last.is_complete:
            last.more_body = False
            if last.waiter is not None:
                last.receive_end()
        self._sending, self._head_bytes = "idle", 0
