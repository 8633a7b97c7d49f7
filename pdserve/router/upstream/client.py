"""The HTTP client of the router: one keep-alive pool for each worker.

Whose fault it is that a connection cannot be opened: the worker's, or this machine's. Pure.

A worker whose port is closed is down. Without a free file descriptor, or while no name server answers, the
router learns nothing about any worker.

Keep-alive connections to one worker.

An idle connection is not used again after `IDLE_S`. SGLang's server closes it after 5 s.

The HTTP client of the router: requests to workers, over one keep-alive pool for each worker.

A reused connection may turn out to be closed before the first byte of the answer. The request is then sent
again on another connection: the worker never saw the request, or dropped it with the connection.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import msgspec

from pdserve.router.config.limits import Limits
from pdserve.router.deadlines import Deadlines
from pdserve.router.upstream.connection import Connection, ConnectionOwner, Response, UpstreamError, WorkerTls

_OWN_ERRNOS = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.ENETDOWN)
)
_OWN_NAME_ERRORS = frozenset((socket.EAI_AGAIN, socket.EAI_MEMORY, socket.EAI_SYSTEM))


def is_own_fault(error: BaseException) -> bool:
    """This machine could not try: it lacks descriptors, ports or memory, or no name server answers."""
    return any(_is_own(cause) for cause in os_errors(error))


def is_refused(error: BaseException) -> bool:
    """The port is closed: at every address of the worker, the connection was refused."""
    causes = [cause for cause in os_errors(error) if cause.errno is not None]
    return bool(causes) and all(cause.errno == errno.ECONNREFUSED for cause in causes)


def os_errors(error: BaseException) -> Iterator[OSError]:
    """The errors of the operating system that led to `error`, through causes and groups."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, OSError):
            yield one
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
        waiting += (one.__cause__, one.__context__)


def _is_own(error: OSError) -> bool:
    if isinstance(error, socket.gaierror):
        return error.errno in _OWN_NAME_ERRORS
    return error.errno in _OWN_ERRNOS


MAX_IDLE = 256
"""Idle keep-alive connections to one worker."""
IDLE_S = 4.0
LAST_WORD_S = 1.0
"""A peer's time to answer the end of TLS."""


class Peer(Protocol):
    """The attributes of a worker that its connections use."""

    id: str
    url: str
    id_header: bytes
    host: str
    port: int
    is_tls: bool


class ConnectionCounts(msgspec.Struct):
    """Counters for metrics: connections opened, reused, found stale, and failed to open."""

    opened: int = 0
    reused: int = 0
    stale: int = 0
    failed: int = 0


class WorkerPool(ConnectionOwner):
    """The connections to one worker.

    The most recently used idle connection is used first, so the others can age out.
    """

    def __init__(
        self,
        worker: Peer,
        limits: Limits,
        counts: ConnectionCounts,
        tls: WorkerTls,
        authorization: bytes = b"",
    ) -> None:
        """`authorization`: the header's whole line; empty: none is sent."""
        self.lines = b" HTTP/1.1\r\nhost: %b\r\n%bcontent-length: " % (worker.id_header, authorization)
        """What stands in each request between its target and the length of its body."""
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._counts = counts
        self._tls = tls
        self._idle: deque[Connection] = deque()
        self._open: set[Connection] = set()
        self._connecting = 0

    @property
    def open_count(self) -> int:
        """Number of open connections."""
        return len(self._open)

    @property
    def idle_count(self) -> int:
        """Number of open connections that no request uses."""
        return sum(connection.is_usable for connection in self._idle)

    @property
    def is_empty(self) -> bool:
        """No connection is open or being opened."""
        return not self._open and not self._connecting

    def take_idle(self, now_s: float) -> Connection | None:
        """An idle connection that the worker has likely not closed, or None."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable and now_s - connection.idle_since_s < IDLE_S:
                self._counts.reused += 1
                return connection
            self._discard(connection)
        return None

    async def connect(self, timeout_s: float) -> Connection:
        """Open a connection. Raises UpstreamError `busy` at a limit of this router or its machine, else
        `connect`.
        """
        if len(self._open) + self._connecting >= self._limits.worker_connections:
            raise UpstreamError("busy", f"worker {self._worker.id} has all its connections in use")
        context = self._tls.context(self._worker)
        self._connecting += 1
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self),
                    self._worker.host,
                    self._worker.port,
                    ssl=context,
                    ssl_handshake_timeout=timeout_s if context else None,
                    ssl_shutdown_timeout=LAST_WORD_S if context else None,
                )
        except TimeoutError:
            self._counts.failed += 1
            what = f"worker {self._worker.id}: no connection in {timeout_s} s"
            raise UpstreamError("connect", what) from None
        except OSError as error:
            self._counts.failed += 1
            if is_own_fault(error):
                raise UpstreamError("busy", f"this router cannot open a connection: {error}") from None
            is_down = is_refused(error)
            raise UpstreamError("connect", f"worker {self._worker.id}: {error}", is_down=is_down) from None
        finally:
            self._connecting -= 1
        self._open.add(connection)
        self._counts.opened += 1
        return connection

    def keep(self, connection: Connection) -> None:
        """Keep the connection for another request, or close it if enough are idle."""
        if len(self._idle) >= MAX_IDLE:
            self._discard(connection)
            return
        connection.idle_since_s = self._loop.time()
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self._open.discard(connection)
        if connection in self._idle:  # closed by the worker
            self._idle.remove(connection)

    def drop_aged(self, now_s: float) -> None:
        """Close idle connections that are too old to be used again."""
        while self._idle and (now_s - self._idle[0].idle_since_s >= IDLE_S or not self._idle[0].is_usable):
            self._discard(self._idle.popleft())

    def cut_all(self) -> None:
        """Close every connection. The responses that are in progress fail with `down`."""
        self._idle.clear()
        for connection in list(self._open):
            connection.fail(UpstreamError("down", f"worker {self._worker.id} is down"))
        self._open.clear()

    def _discard(self, connection: Connection) -> None:
        self._open.discard(connection)
        connection.cut()


IDLE_CHECK_S = 1.0


class Upstream:
    """The connection pools of all workers. Its constructor needs a running event loop."""

    def __init__(self, limits: Limits, token: str = "", tls: WorkerTls | None = None) -> None:
        """`token`: the cluster's bearer token, sent with each request. Empty: no token is sent."""
        self._limits = limits
        self._tls = tls or WorkerTls()
        self._authorization = b"authorization: Bearer %b\r\n" % token.encode("ascii") if token else b""
        self._loop = asyncio.get_running_loop()
        self._pools: dict[str, WorkerPool] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.deadlines = Deadlines(self._loop)
        self.counts = ConnectionCounts()

    def pool(self, worker: Peer) -> WorkerPool:
        """The worker's pool, made at the first call."""
        pool = self._pools.get(worker.url)
        if pool is None:
            pool = self._pools[worker.url] = WorkerPool(
                worker, self._limits, self.counts, self._tls, self._authorization
            )
            if self._timer is None:
                self._timer = self._loop.call_later(IDLE_CHECK_S, self._drop_aged)
        return pool

    async def ask(
        self,
        worker: Peer,
        target: str,
        headers: bytes,
        body: bytes,
        *,
        connect_s: float,
        head_s: float,
        method: bytes = b"POST",
    ) -> Response:
        """Send `body` to `target` of `worker`. Returns when the head of the answer has arrived.

        `headers` are complete header lines, each ended by CRLF; host and length are added here. The caller
        must `release()` the response. Raises UpstreamError. After an error or a cancellation the connection
        is closed.
        """
        pool = self._pools.get(worker.url) or self.pool(worker)
        head = b"%b %b%b%d\r\n%b\r\n" % (method, target.encode("ascii"), pool.lines, len(body), headers)
        connection = pool.take_idle(self._loop.time())
        stale = ""
        while True:
            if connection is None:
                connection = await self._connect(pool, connect_s, stale)
            may_be_stale = connection.used
            response = None
            try:
                response = connection.start(head, body, self.deadlines)
                while not response.status:
                    await response.news(head_s)
            except UpstreamError as error:
                if response is not None:
                    response.release()
                is_stale = error.kind == "closed" and (response is None or not response.received_bytes)
                if not (may_be_stale and is_stale):
                    raise
                self.counts.stale += 1
                connection, stale = None, str(error)
                continue
            except BaseException:  # cancelled: the client has gone
                if response is not None:
                    response.release()
                raise
            return response

    @staticmethod
    async def _connect(pool: WorkerPool, connect_s: float, stale: str) -> Connection:
        """A new connection. `stale`: how an idle one ended that had taken the request; empty: there was none.
        If the port is closed now, the worker may have ended by the request: that is `closed`, not `connect`.
        """
        try:
            return await pool.connect(connect_s)
        except UpstreamError as error:
            if stale and error.kind == "connect":
                raise UpstreamError("closed", stale, is_down=error.is_down) from None
            raise

    def cut_worker(self, worker: Peer) -> None:
        """Fail all requests in flight to `worker`, which is known to be dead."""
        self.pool(worker).cut_all()

    @property
    def open_count(self) -> int:
        """Connections open to all workers."""
        return sum(pool.open_count for pool in self._pools.values())

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
