"""A client's connection: uvicorn's httptools protocol, with a limit on every wait for a client.

uvicorn limits how long a connection may be idle after an answer. A client can do more: send nothing at all,
send a head drop by drop or without an end, or go on sending a body after its answer. A connection is in one
of these states, and each state has a limit:

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

A head that asks for another protocol, of a target that `upgrades` takes, ends HTTP on its connection: it is
handed over whole (`upgrade`). Others that ask so are answered as if they did not.

When the server stops, uvicorn would close idle connections at once, and lose a request that is on its way.
Here an idle connection stays for `LINGER_S`, and a request that comes meanwhile is answered with
`Connection: close`. The same holds for a connection whose answer has promised to keep it alive, and for one
that was accepted just before.

Pipelined requests are read within `MAX_AHEAD` and `MAX_AHEAD_BYTES` while an answer is under way: whether a
client has left is seen only by reading. What was read at once may hold more of them, up to `MAX_PIPELINED`.
The connection of a client that sends more is closed: each takes some kilobytes, whatever its length.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Literal, Protocol

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from pdserve.crowd import Crowd
from pdserve.router.server.request_cycle import RequestCycle
from pdserve.router.server.upgrade import Upgraded, UpgradeHandler

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
_NOT_HTTP: Final = "Invalid HTTP request received."

State = Literal["idle", "head", "answering", "rest", "closing", "gone"]


class Connections(ServerState):
    """uvicorn's state of a server, and whether the server has begun to stop."""

    is_stopping = False

    def __init__(self) -> None:
        super().__init__()
        self.crowd: Crowd[ClientConnection] = Crowd(math.inf)
        """All connections. Beyond its bound those go that wait for no answer."""
        self._default_lines = b""
        self._lined = self.default_headers

    @property
    def default_lines(self) -> bytes:
        """`default_headers` as they stand in a head. uvicorn makes a new list of them each second."""
        if self._lined is not self.default_headers:
            self._lined = self.default_headers
            self._default_lines = b"".join(b"%b: %b\r\n" % pair for pair in self._lined)
        return self._default_lines


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
    """One connection. `direct` gets the requests for its targets, uvicorn's application all others."""

    server_state: Connections

    def __init__(
        self,
        *,
        head_s: float,
        client_read_s: float,
        direct: DirectHandler | None = None,
        upgrades: UpgradeHandler | None = None,
        **given: Any,
    ) -> None:
        super().__init__(**given)
        self._head_s = head_s
        self._client_read_s = client_read_s
        self._direct = direct
        self._targets: Mapping[bytes, str] = {} if direct is None else direct.targets
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
        self._on_gone: Callable[[], None] | None = None
        self._upgrades = upgrades
        self._is_upgraded = False

    # --- the state

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_busy(self) -> bool:
        return self._is_answering or self._is_upgraded

    def _update(self) -> None:
        """Take the state that `cycle` and `_sending` say."""
        cycle = self.cycle
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
        elif self.server_state.is_stopping:
            limit_s = LINGER_S
        else:
            limit_s = self.timeout_keep_alive if state == "idle" else self._head_s
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
            self._arm(min(left_s, self.timeout_keep_alive))
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
        super().pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        """The client has taken most of it."""
        super().resume_writing()
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
            self._unread_timer = self.loop.call_later(self._client_read_s, self._on_unread)

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

    def connection_made(self, transport: Any) -> None:
        """The client's connection stands."""
        super().connection_made(transport)
        self._enter("idle")
        address = self.client[0] if self.client else ""
        goes = self.server_state.crowd.came(self, address, lambda one: not one._is_busy)
        if goes is not None:
            goes.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        if self._timer is not None:
            self._timer.cancel()
        self._forget_unread()
        self.server_state.crowd.left(self)
        super().connection_lost(exc)
        # request and connection hold each other, and the garbage collector runs seldom
        self.cycle = self.scope = None  # type: ignore[assignment]
        self._enter("gone")
        if self._on_gone is not None:
            self._on_gone()

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if self.is_closing:
            return
        if self._sending == "idle":
            self._sending = "head"
        self._head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.logger.warning(_NOT_HTTP)
            self.send_400_response(_NOT_HTTP)
        except httptools.HttpParserUpgrade as upgrade:
            if self._is_upgraded:
                self._hand_over(data[upgrade.args[0] :])
                return
            self._unsupported_upgrade_warning()
        if self.pipeline and not self.transport.is_closing():
            if self._is_far_ahead:
                self.flow.pause_reading()
            else:  # it was paused at the head
                self.flow.resume_reading()
        if self._sending == "head" and (
            self._head_bytes > MAX_HEAD_BYTES or len(self.headers or ()) > MAX_HEADERS
        ):
            self._refuse(_TOO_LONG)
            self.headers = []
        self._update()

    @property
    def _is_far_ahead(self) -> bool:
        """Enough is waiting for its turn."""
        waiting = self.pipeline
        return len(waiting) > MAX_AHEAD or sum(len(cycle.body) for cycle, _ in waiting) > MAX_AHEAD_BYTES

    def shutdown(self) -> None:
        """The server stops: the next answer here is the last."""
        if not self._is_answering:
            if not self.is_closing:
                self._enter(self._state)
        elif not self.cycle.response_started:
            self.cycle.keep_alive = False

    def _refuse(self, answer: bytes) -> None:
        """Close with this answer; if another one is under way, cut that off."""
        if self.is_closing or self.transport.is_closing():
            return
        if self._is_answering:
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

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Call `on_gone` when the client goes away, now if it has, until `unwatch`."""
        self._on_gone = on_gone
        if self.flow.read_paused and not self._is_far_ahead:  # for a large body, which was read
            self.flow.resume_reading()
        if self._state == "gone":
            on_gone()

    def unwatch(self) -> None:
        """The request is over."""
        self._on_gone = None

    def on_response_complete(self) -> None:
        """The answer is sent: the next request's turn."""
        self.server_state.total_requests += 1
        if self.is_closing or self.transport.is_closing():
            self._watch_unread()
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        if self.flow.read_paused and not self._is_far_ahead:
            self.flow.resume_reading()
        self._update()

    # --- httptools

    def on_message_begin(self) -> None:
        """A head begins."""
        self._sending = "head"
        self.url, self.headers, self.expect_100_continue = b"", [], False

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header line. A trailer is passed over: it would override what others have checked."""
        if self._sending == "rest" or len(self.headers) > MAX_HEADERS:
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is complete."""
        if self.transport.is_closing():
            return  # the rest of what was read at once
        self._sending = "rest"
        if len(self.headers) > MAX_HEADERS or len(self.pipeline) >= MAX_PIPELINED:
            self._refuse(_TOO_LONG)
            return
        if self.parser.should_upgrade() and self._takes_upgrade():
            self._is_upgraded = True
            return
        path = self._targets.get(self.url)
        if path is not None and self.parser.get_method() == b"POST" and self._is_plain:
            self._begin_direct(path)
        else:
            self._begin_ordinary()
        if self.server_state.is_stopping:
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
            assert self._direct is not None
            client.begin(self._direct.serve)
        else:  # pipelined: its turn comes
            self.pipeline.appendleft((client, self.app))  # type: ignore[arg-type]

    def _takes_upgrade(self) -> bool:
        handler = self._upgrades
        is_first = not self._is_answering and self.parser.get_method() == b"GET"
        return handler is not None and is_first and handler.takes(self.url)

    def _hand_over(self, rest: bytes) -> None:
        """This connection is no HTTP any more. `rest`: what was read behind the head."""
        assert self._upgrades is not None
        if self._timer is not None:
            self._timer.cancel()
        state, address = self.server_state, self.client[0] if self.client else ""
        state.connections.discard(self)
        client = Upgraded(self.transport, self.url, self.headers, address)
        client.adopt(rest, partial(state.crowd.left, self))
        task = self.loop.create_task(self._upgrades.serve(client))
        state.tasks.add(task)
        task.add_done_callback(state.tasks.discard)

    def _begin_ordinary(self) -> None:
        """uvicorn's way. uvicorn makes a scope when a head begins; here it is made only where it is used."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.scope["headers"] = self.headers = headers
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """A request's turn has come."""
        if isinstance(cycle, RequestCycle):
            assert self._direct is not None
            cycle.begin(self._direct.serve)
        else:
            super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        if self.is_closing:
            return
        cycle: Any = self.cycle
        if type(cycle) is RequestCycle:
            cycle.receive(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete. What comes next is another head, and not counted with this one."""
        if self.is_closing or self._is_upgraded:
            return
        self._sending, self._head_bytes = "idle", 0
        cycle: Any = self.cycle
        if type(cycle) is RequestCycle:
            cycle.receive_end()
        else:
            super().on_message_complete()
