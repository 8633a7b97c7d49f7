"""Keep-alive connections to one worker.

An idle connection is not used again after `IDLE_S`. SGLang's server closes it after 5 s.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

import msgspec

from pdserve.router.config.limits import Limits
from pdserve.router.upstream.connect_errors import is_own_fault
from pdserve.router.upstream.connection import Connection, ConnectionOwner
from pdserve.router.upstream.response import UpstreamError
from pdserve.router.upstream.worker_tls import WorkerTls

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
            raise UpstreamError("connect", f"worker {self._worker.id}: {error}") from None
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
