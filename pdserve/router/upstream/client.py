"""Keep-alive connections to the workers, one pool for each.

An idle connection is not used again after `IDLE_S`, which is below the 5 s after which SGLang's server
closes it. A reused connection that turns out to be closed before any byte of the answer is replaced once
by a fresh one: the worker never saw the request, or gave it up with the connection.
"""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec

from pdserve.router.config.limits import Limits
from pdserve.router.deadlines import Deadlines
from pdserve.router.fleet.worker import Worker
from pdserve.router.upstream.connection import Connection, ConnectionOwner
from pdserve.router.upstream.response import Exchange, UpstreamError

IDLE_S = 4.0
IDLE_CHECK_S = 1.0


class ConnectionCounts(msgspec.Struct):
    """Totals since the start, for metrics."""

    opened: int = 0
    reused: int = 0
    stale: int = 0
    failed: int = 0


class WorkerPool(ConnectionOwner):
    """The connections to one worker. The most recently used idle one is used first, so that the rest can
    age out.
    """

    def __init__(self, worker: Worker, limits: Limits, counts: ConnectionCounts) -> None:
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._counts = counts
        self._idle: deque[Connection] = deque()
        self._open: set[Connection] = set()
        self._connecting = 0

    @property
    def open_count(self) -> int:
        """Connections that are open."""
        return len(self._open)

    @property
    def idle_count(self) -> int:
        """Open connections that no request uses."""
        return sum(connection.is_usable for connection in self._idle)

    @property
    def is_empty(self) -> bool:
        """No connection is open or being opened."""
        return not self._open and not self._connecting

    def take_idle(self, now_s: float) -> Connection | None:
        """A connection that is likely still open on the other side."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable and now_s - connection.idle_since_s < IDLE_S:
                self._counts.reused += 1
                return connection
            self._discard(connection)
        return None

    async def connect(self, timeout_s: float) -> Connection:
        """A fresh connection. Raises UpstreamError (`connect`, `busy`)."""
        if len(self._open) + self._connecting >= self._limits.worker_connections:
            raise UpstreamError("busy", f"worker {self._worker.id} has all its connections in use")
        self._connecting += 1
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self), self._worker.host, self._worker.port
                )
        except TimeoutError:
            self._counts.failed += 1
            what = f"worker {self._worker.id}: no connection in {timeout_s} s"
            raise UpstreamError("connect", what) from None
        except OSError as error:
            self._counts.failed += 1
            raise UpstreamError("connect", f"worker {self._worker.id}: {error}") from None
        finally:
            self._connecting -= 1
        self._open.add(connection)
        self._counts.opened += 1
        return connection

    def keep(self, connection: Connection) -> None:
        """Back from a request, idle and clean."""
        if len(self._idle) >= self._limits.idle_connections:
            self._discard(connection)
            return
        connection.idle_since_s = self._loop.time()
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """Closed."""
        self._open.discard(connection)
        if connection in self._idle:  # closed by the worker
            self._idle.remove(connection)

    def drop_aged(self, now_s: float) -> None:
        """Close idle connections that are too old to be used again."""
        while self._idle and (now_s - self._idle[0].idle_since_s >= IDLE_S or not self._idle[0].is_usable):
            self._discard(self._idle.popleft())

    def cut_all(self) -> None:
        """Close every connection, those in use too: their exchanges fail (`down`)."""
        self._idle.clear()
        for connection in list(self._open):
            connection.fail(UpstreamError("down", f"worker {self._worker.id} is down"))
        self._open.clear()

    def _discard(self, connection: Connection) -> None:
        self._open.discard(connection)
        connection.cut()


class Upstream:
    """All pools, with the requests that go over them. Make it inside the running loop."""

    def __init__(self, limits: Limits, token: str = "") -> None:
        """`token`: the cluster's, shown to the workers."""
        self._limits = limits
        self._authorization = b"authorization: Bearer %b\r\n" % token.encode("ascii") if token else b""
        self._loop = asyncio.get_running_loop()
        self._pools: dict[str, WorkerPool] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.deadlines = Deadlines(self._loop)
        self.counts = ConnectionCounts()

    def pool(self, worker: Worker) -> WorkerPool:
        """The worker's pool."""
        pool = self._pools.get(worker.id)
        if pool is None:
            pool = self._pools[worker.id] = WorkerPool(worker, self._limits, self.counts)
            if self._timer is None:
                self._timer = self._loop.call_later(IDLE_CHECK_S, self._drop_aged)
        return pool

    async def post(
        self,
        worker: Worker,
        target: str,
        headers: bytes,
        body: bytes,
        *,
        connect_s: float,
        head_s: float,
    ) -> Exchange:
        """POST `body` to `target` of `worker`; returns when the answer's head has come.

        `headers` are finished header lines, each ended by CRLF; host and length are added here. The caller
        must `release()` the exchange. Raises UpstreamError; then, as on cancellation, nothing is left open.
        """
        pool = self._pools.get(worker.id) or self.pool(worker)
        head = b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-length: %d\r\n%b%b\r\n" % (
            target.encode("ascii"),
            worker.id_header,
            len(body),
            self._authorization,
            headers,
        )
        connection = pool.take_idle(self._loop.time())
        while True:
            if connection is None:
                connection = await pool.connect(connect_s)
            may_be_stale = connection.used
            exchange = None
            try:
                exchange = connection.start(head, body, self.deadlines)
                await exchange.head(head_s)
            except UpstreamError as error:
                if exchange is not None:
                    exchange.release()
                is_stale = error.kind == "closed" and (exchange is None or not exchange.received_bytes)
                if not (may_be_stale and is_stale):
                    raise
                self.counts.stale += 1
                connection = None
                continue
            except BaseException:  # cancelled: the client has gone
                if exchange is not None:
                    exchange.release()
                raise
            return exchange

    def cut_worker(self, worker: Worker) -> None:
        """Fail everything in flight to `worker`, which is known to be dead."""
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
        for worker_id, pool in list(self._pools.items()):
            pool.drop_aged(now_s)
            if pool.is_empty:  # its worker may have left; if not, it is made anew
                del self._pools[worker_id]
        self._timer = self._loop.call_later(IDLE_CHECK_S, self._drop_aged)
