"""The HTTP client of the router: requests to workers, over one keep-alive pool for each worker.

A reused connection may turn out to be closed before the first byte of the answer. The request is then sent
again on another connection: the worker never saw the request, or dropped it with the connection.
"""

from __future__ import annotations

import asyncio

from pdserve.router.config.limits import Limits
from pdserve.router.deadlines import Deadlines
from pdserve.router.upstream.connection import Connection
from pdserve.router.upstream.pool import ConnectionCounts, Peer, WorkerPool
from pdserve.router.upstream.response import Response, UpstreamError
from pdserve.router.upstream.worker_tls import WorkerTls

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
                raise UpstreamError("closed", stale) from None
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
