"""Connections to workers: HTTP/1.1 on an asyncio protocol, a keep-alive pool for each worker.

A `WorkerConnection` carries one exchange at a time: a request, and its answer while that arrives.

- Whoever asks waits for the end of the answer, whole or broken off, and is resumed then (`driven`). What
  comes of an answer before its end goes to a `sink`, if there is one, in the callback that has read it:
  waking somebody for each token of each stream costs more than passing the token on.
- Body bytes are passed on unread; only the transfer coding is removed. A body without a length is complete
  when the connection ends, unless the connection was reset, or TLS was spoken: then the end may be a
  stranger's. A body with a length or chunked coding must not end with the connection: that is an error, as
  are bytes that are not HTTP, an endless head, and bytes without a request. 1xx heads are skipped.
- Every wait has a deadline (see `deadlines`). A sink may pause a worker for a slow client; that time does not
  count.
- After a whole answer the connection is kept alive. Otherwise it is closed, which aborts the request in the
  worker. An idle connection is not used again after `IDLE_S`: SGLang's server closes it after 5 s. A reused
  one may turn out to be closed before the first byte of the answer. The request is then sent again on another
  connection: the worker never saw the request, or dropped it with the connection.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import httptools
import msgspec

from pdserve.router.config.limits import Limits
from pdserve.router.http.deadlines import Deadlines
from pdserve.router.http.driven import Driven
from pdserve.router.http.tls import (
    ASKS_FOR_CERTIFICATE,
    ErrorKind,
    UpstreamError,
    WorkerTls,
    is_own_fault,
    is_refused,
)
from pdserve.router.native.answers import Answer

MAX_IDLE = 256
"""Idle keep-alive connections to one worker that are kept for more than `IDLE_CHECK_S`."""
IDLE_S = 4.0
IDLE_CHECK_S = 1.0
LAST_WORD_S = 1.0
"""A peer's time to answer the end of TLS."""
MAX_HEAD_BYTES = 64 * 1024
"""Longest response head (status line and headers). uvicorn has the same limit for requests."""
JOIN_BYTES = 16 * 1024
"""Up to this size, copying head and body together costs less than a second write."""
NOT_PASSED_ON: Final = frozenset(
    b"connection content-length date keep-alive server te trailer transfer-encoding upgrade"
    b" cache-control server-timing x-accel-buffering x-pdserve-marks x-request-id".split()
)
"""Headers of an answer that are of its connection, or that the router sets itself for its own client."""


class Peer(Protocol):
    """The attributes of a worker that its connections use."""

    id: str
    url: str
    id_header: bytes
    host: str
    port: int
    is_tls: bool
    incarnation: str


class Waiter:
    """Waits for the end of an answer in a task, or in a driven coroutine that has other things to wait
    for.
    """

    __slots__ = ("news", "request")

    def __init__(self, request: object = None) -> None:
        """`request`: the client's, for which the worker is asked, if there is one."""
        self.news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.request = request

    def resume(self) -> None:
        """The answer is here, or will not come."""
        if not self.news.done():
            self.news.set_result(None)


class WorkerConnection(Answer, asyncio.Protocol):
    """A keep-alive connection to a worker, and the exchange on it, whose answer it gathers."""

    __slots__ = (
        "_feed", "_is_tls", "_pool", "clock", "deadline_s", "error", "idle_since_s", "incarnation",
        "is_open", "is_paused", "is_stream", "is_young", "limit_bytes", "owner", "received_bytes", "said",
        "sink", "transport",
    )  # fmt: skip
    transport: asyncio.Transport
    limit_bytes: int
    """Of an answer that no sink takes."""
    said: dict[bytes, bytes]
    """The headers by name, once `read_head` was called."""
    is_stream: bool
    """The answer is a stream of events, as of the same call."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self.clock: Deadlines = pool.clock
        self.parser = httptools.HttpResponseParser(self)
        self._feed: Any = self.parser.feed_data
        self._is_tls = False
        self.owner: Driven | Waiter | None = None
        """Is resumed at the end of the answer. None: no exchange is under way."""
        self.incarnation = ""
        """Of the worker that was asked."""
        self.sink: Callable[[WorkerConnection], None] | None = None
        """Is called when the head has come, or `pieces`, and the answer is not whole. Must not raise."""
        self.is_open = False
        self.is_paused = False
        self.idle_since_s = math.inf
        """When it was last kept. Infinite: it is new, and carries its first request."""
        self.is_young = True
        """Nothing of the body has come, or the answer came at once."""
        self.received_bytes = 0
        """In reads that did not complete the answer, until the head is complete; where nobody takes pieces,
        in all of them.
        """
        self.error: UpstreamError | None = None
        self.deadline_s = math.inf

    # --- for who asks

    def take(self) -> bytes:
        """All of the body that has come and was not taken."""
        if self.is_whole:
            rest, self.rest = self.rest, b""
            return rest
        taken = b"".join(self.pieces)
        self.pieces.clear()
        return taken

    def read_head(self) -> None:
        """Look at the headers."""
        self.said = said = dict(self.pairs)
        self.is_stream = said.get(b"content-type", b"").startswith(b"text/event-stream")

    @property
    def asked_by(self) -> object:
        """The client's request for which the worker was asked, if there is one."""
        owner = self.owner
        return owner.request if isinstance(owner, Waiter) else owner

    def pause(self) -> None:
        """Read no more from the worker, whose time stands still."""
        if self.is_open and not self.is_paused:
            self.is_paused, self.deadline_s = True, math.inf
            self.transport.pause_reading()

    def go_on(self, limit_s: float) -> None:
        """Read from the worker again, which has so long for the next piece."""
        if self.is_paused:
            self.is_paused = False
            self.deadline_s = self.clock.now_s + limit_s
            if self.is_open:
                self.transport.resume_reading()

    def expire(self) -> None:
        """The deadline has passed."""
        self.fail(UpstreamError("timeout", "the worker did not answer in time"))

    def fail(self, error: UpstreamError) -> None:
        """The rest of the answer will not come: tell the owner, once."""
        owner = self.owner
        if owner is not None and self.error is None and not self.is_whole:
            self.error = error
            self.keeps = False
            owner.resume()

    def cut(self) -> None:
        """Close at once; unsent bytes are dropped."""
        self.is_open = self.keeps = False
        self._pool.open.discard(self)
        self.transport.abort()

    # --- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open: send small writes at once (TCP_NODELAY; Unix sockets do so anyway)."""
        self.transport = transport  # type: ignore[assignment]
        self.is_open = True
        self._is_tls = transport.get_extra_info("ssl_object") is not None
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Bytes from the worker."""
        owner = self.owner
        if owner is None:  # bytes without a request: the connection is out of step
            self.cut()
            return
        broken = None
        try:
            self._feed(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            broken = UpstreamError("protocol", f"answer is not HTTP: {error.__context__ or error}")
        if self.is_whole:
            owner.resume()
            return
        sink = self.sink
        if sink is not None and self.pieces:
            self.is_young = False
            sink(self)
        elif sink is None or not self.status:
            self._receive(len(data))
        elif self.is_young:
            sink(self)
        if broken is not None:
            self.fail(broken)

    def _receive(self, size: int) -> None:
        """Bytes of a head, or of an answer that is wanted whole: bounded."""
        self.received_bytes += size
        if self.pieces:
            self.is_young = False
        if self.received_bytes > MAX_HEAD_BYTES:
            if not self.status:
                what = f"answer's head is longer than {MAX_HEAD_BYTES} bytes"
                self.fail(UpstreamError("protocol", what))
            elif self.received_bytes > self.limit_bytes + MAX_HEAD_BYTES:
                self.fail(UpstreamError("protocol", f"answer is longer than {self.limit_bytes} bytes"))

    def connection_lost(self, exc: Exception | None) -> None:
        """This side or the worker has closed the connection."""
        self.is_open = self.keeps = False
        self._pool.on_closed(self)
        owner = self.owner
        if owner is not None and not self.is_whole:
            has_length = any(name in (b"content-length", b"transfer-encoding") for name, _ in self.pairs)
            if self.status and exc is None and not has_length and not self._is_tls:
                self.on_message_complete()  # no length: the end of the connection is the end of the body
            if self.is_whole:
                owner.resume()
            else:
                self._fail_at_end()
        # reference cycles, and the garbage collector runs seldom (`GC_THRESHOLD`)
        self.parser = self._feed = None

    def _fail_at_end(self) -> None:
        kind: ErrorKind = "cut" if self.status else "closed"
        refused = self._is_tls and self.idle_since_s == math.inf and not self.received_bytes
        why = f" before an answer: {ASKS_FOR_CERTIFICATE}" if refused else ""
        self.fail(UpstreamError(kind, f"the worker closed the connection{why}"))


class ConnectionCounts(msgspec.Struct):
    """Counters for metrics: connections opened, reused, found stale, and failed to open."""

    opened: int = 0
    reused: int = 0
    stale: int = 0
    failed: int = 0


class WorkerPool:
    """The connections to one worker. The most recently used idle one is used first, so the others can age
    out.
    """

    def __init__(self, worker: Peer, upstream: Upstream, authorization: bytes) -> None:
        """`authorization`: the header's whole line; empty: none is sent."""
        self.lines = b" HTTP/1.1\r\nhost: %b\r\n%bcontent-length: " % (worker.id_header, authorization)
        """What stands in each request between its target and the length of its body."""
        self.worker = worker
        self.clock: Deadlines = upstream.deadlines
        self.counts = upstream.counts
        self.idle: deque[WorkerConnection] = deque()
        self.open: set[WorkerConnection] = set()
        self._upstream = upstream
        self._connecting = 0

    @property
    def idle_count(self) -> int:
        """Number of open connections that no request uses."""
        return sum(connection.keeps for connection in self.idle)

    @property
    def is_empty(self) -> bool:
        """No connection is open or being opened."""
        return not self.open and not self._connecting

    def take_idle(self, now_s: float) -> WorkerConnection | None:
        """An idle connection that the worker has likely not closed, or None."""
        idle = self.idle
        while idle:
            connection = idle.pop()
            if connection.keeps and now_s - connection.idle_since_s < IDLE_S:
                self.counts.reused += 1
                return connection
            connection.cut()
        return None

    async def connect(self, stale: UpstreamError | None) -> WorkerConnection:
        """Open a connection; runs in a task. Raises UpstreamError `busy` at a limit of this router or its
        machine, else `connect`. `stale`: how an idle one ended that had taken the request. If the port is
        closed now, the worker may have ended by the request: that is this error, and not `connect`.
        """
        worker, counts, upstream = self.worker, self.counts, self._upstream
        timeout_s = upstream.connect_s
        if len(self.open) + self._connecting >= upstream.limits.worker_connections:
            raise UpstreamError("busy", f"worker {worker.id} has all its connections in use")
        self._connecting += 1
        try:
            context = upstream.tls.context(worker)
            async with asyncio.timeout(timeout_s):
                _, connection = await self.clock.loop.create_connection(
                    lambda: WorkerConnection(self),
                    worker.host,
                    worker.port,
                    ssl=context,
                    ssl_handshake_timeout=timeout_s if context else None,
                    ssl_shutdown_timeout=LAST_WORD_S if context else None,
                )
        except TimeoutError:
            counts.failed += 1
            what = f"worker {worker.id}: no connection in {timeout_s} s"
            raise stale or UpstreamError("connect", what) from None
        except OSError as error:
            counts.failed += 1
            if is_own_fault(error):
                raise UpstreamError("busy", f"this router cannot open a connection: {error}") from None
            is_down = is_refused(error)
            if stale is not None:
                stale.is_down = is_down
                raise stale from None
            raise UpstreamError("connect", f"worker {worker.id}: {error}", is_down=is_down) from None
        finally:
            self._connecting -= 1
        self.open.add(connection)
        counts.opened += 1
        return connection

    def on_closed(self, connection: WorkerConnection) -> None:
        """A connection is closed, by whichever side."""
        self.open.discard(connection)
        if connection in self.idle:  # closed by the worker
            self.idle.remove(connection)

    def asked_by(self) -> Iterable[WorkerConnection]:
        """Those on which the worker was asked for a client's request."""
        return [connection for connection in self.open if connection.asked_by is not None]

    def drop_aged(self, now_s: float) -> None:
        """Close idle connections that are too old to be used again, or too many."""
        idle = self.idle
        while idle and (
            now_s - idle[0].idle_since_s >= IDLE_S or not idle[0].is_open or len(idle) > MAX_IDLE
        ):
            idle.popleft().cut()

    def cut_all(self) -> None:
        """Close every connection. The exchanges that are in progress fail with `down`."""
        self.idle.clear()
        for connection in list(self.open):
            connection.fail(UpstreamError("down", f"worker {self.worker.id} is down"))
            connection.cut()


class Fetched(msgspec.Struct, frozen=True, gc=False):
    """A worker's whole answer."""

    status: int
    body: bytes


class Upstream:
    """The connections to all workers. Its constructor needs a running event loop."""

    def __init__(
        self, limits: Limits, token: str = "", tls: WorkerTls | None = None, connect_s: float = 5.0
    ) -> None:
        """`token`: the cluster's bearer token, sent with each request. Empty: no token is sent. `connect_s`:
        the most that opening a connection takes.
        """
        self.limits = limits
        self.connect_s = connect_s
        self.tls = tls or WorkerTls()
        self._authorization = b"authorization: Bearer %b\r\n" % token.encode("ascii") if token else b""
        self._loop = asyncio.get_running_loop()
        self._pools: dict[str, WorkerPool] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.deadlines = Deadlines(self._loop, self.exchanges)
        self.counts = ConnectionCounts()

    def pool(self, worker: Peer) -> WorkerPool:
        """The worker's pool, made at the first call."""
        pool = self._pools.get(worker.url)
        if pool is None:
            pool = self._pools[worker.url] = WorkerPool(worker, self, self._authorization)
            if self._timer is None:
                self._timer = self._loop.call_later(IDLE_CHECK_S, self._drop_aged)
        return pool

    async def exchange(
        self,
        owner: Driven | Waiter,
        worker: Peer,
        target: bytes,
        lines: bytes,
        body: bytes,
        limit_s: float,
        sink: Callable[[WorkerConnection], None] | None = None,
        limit_bytes: int = 0,
        method: bytes = b"POST",
    ) -> WorkerConnection:
        """Send `body` to `target` of `worker`, and wait for the end of the answer. Returns the connection,
        which others can use from now on: `status`, `said`, `lines` and `take()` of the answer are to be read
        before the next wait. Raises UpstreamError.

        `lines` are complete header lines, each ended by CRLF; host and length are added here. `limit_s`: for
        the answer, as long as the sink says nothing else. After an error or a cancellation the connection is
        closed.
        """
        pool = self._pools.get(worker.url) or self.pool(worker)
        now_s, idle, up, stale = self.deadlines.now_s, pool.idle, None, None
        head = b"%b %b%b%d\r\n%b\r\n" % (method, target, pool.lines, len(body), lines)
        if idle:
            up = idle.pop()
            if up.keeps and now_s - up.idle_since_s < IDLE_S:
                self.counts.reused += 1
            else:
                up.cut()
                up = pool.take_idle(now_s)
        while True:
            if up is None:
                up = await self._connected(pool, stale)
                now_s = self.deadlines.now_s
                if not up.is_open:  # since it was opened, before it could be used
                    raise UpstreamError("closed", "the connection was closed")
            up.owner, up.sink, up.limit_bytes = owner, sink, limit_bytes
            up.incarnation, up.deadline_s = worker.incarnation, now_s + limit_s
            up.status = up.received_bytes = 0
            up.is_whole, up.is_young = False, True
            if len(body) <= JOIN_BYTES:
                up.transport.write(head + body)
            else:
                up.transport.writelines([head, body])
            try:
                await owner.news
            finally:  # kept for the next one if the answer is whole, else closed
                up.owner = up.sink = None
                if up.is_paused:
                    up.go_on(math.inf)
                if up.is_whole and up.keeps:
                    up.idle_since_s = self.deadlines.now_s
                    idle.append(up)
                else:
                    up.cut()
            error = up.error
            if error is None:
                return up
            error.incarnation, error.is_young = up.incarnation, up.is_young
            up.error = None  # a reference cycle: its traceback refers to this connection
            may_be_stale = up.idle_since_s != math.inf and not up.received_bytes
            if not (may_be_stale and error.kind == "closed"):
                error.rest = up.take()
                raise error
            self.counts.stale += 1
            up, stale = None, error
            if isinstance(owner, Waiter):
                owner = Waiter(owner.request)

    async def fetch(
        self,
        worker: Peer,
        target: str,
        lines: bytes,
        body: bytes,
        *,
        limit_s: float,
        limit_bytes: int,
        method: bytes = b"POST",
    ) -> Fetched:
        """As `exchange`, for an answer that is wanted whole; in a task, or beside other waits."""
        up = await self.exchange(
            Waiter(),
            worker,
            target.encode("ascii"),
            lines,
            body,
            limit_s=limit_s,
            limit_bytes=limit_bytes,
            method=method,
        )
        return Fetched(up.status, up.take())

    @staticmethod
    async def _connected(pool: WorkerPool, stale: UpstreamError | None) -> WorkerConnection:
        connecting = asyncio.get_running_loop().create_task(pool.connect(stale))
        try:
            await asyncio.wait({connecting})
        except BaseException:
            connecting.cancel()
            connecting.add_done_callback(_drop)
            raise
        return connecting.result()

    def exchanges(self) -> list[WorkerConnection]:
        """The connections on which an answer is awaited."""
        return [up for pool in self._pools.values() for up in pool.open if up.owner is not None]

    def cut_worker(self, worker: Peer) -> None:
        """Fail all requests in flight to `worker`, which is known to be dead."""
        self.pool(worker).cut_all()

    @property
    def open_count(self) -> int:
        """Connections open to all workers."""
        return sum(len(pool.open) for pool in self._pools.values())

    @property
    def idle_count(self) -> int:
        """Connections of all workers that no request uses."""
        return sum(pool.idle_count for pool in self._pools.values())

    def close(self) -> None:
        """Close every connection and stop the timers."""
        for pool in self._pools.values():
            pool.cut_all()
        self.deadlines.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _drop_aged(self) -> None:
        now_s = self._loop.time()
        for url, pool in list(self._pools.items()):
            pool.drop_aged(now_s)
            if pool.is_empty:  # its worker may have left; if not, `pool` makes a new one
                del self._pools[url]
        self._timer = self._loop.call_later(IDLE_CHECK_S, self._drop_aged)


def _drop(connecting: asyncio.Task[WorkerConnection]) -> None:
    """Nobody waits for it any more."""
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().cut()
