"""A client's connections to one node, and whether to try it at all.

The breaker has two states. **Up**: operations borrow a connection (at most `limit` at once; one that finds
none free waits for it until its deadline). **Down**: after one failure every operation is refused at once,
without touching the network, and a background thread probes the node every `retry_after_s` until a connection
succeeds. So a dead pool costs a request one short deadline in all, not one per page, and a node that came
back is noticed without a request paying for the attempt.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pdserve.errors import PdserveError, PoolError, PoolRefused, PoolTimeout, PoolUnavailable
from pdserve.kvpool.messages import Fault, Opened, OpenNamespace
from pdserve.kvpool.transports.base import Connection

logger = logging.getLogger(__name__)


class OpenConnection:
    """A connection with the namespace opened on it."""

    def __init__(self, connection: Connection, namespace: int, generation: int) -> None:
        self.connection = connection
        self.namespace = namespace
        self.generation = generation  # of the link when it was opened; an older one is closed, not reused
        self._next_id = 1  # 1 was OpenNamespace

    def next_id(self) -> int:
        self._next_id += 1
        return self._next_id


class NodeLink:
    """Bounded set of connections to one node, behind a breaker. Thread-safe."""

    def __init__(
        self,
        name: str,
        connect: Callable[[float], Connection],
        *,
        namespace: str,
        geometry: dict[str, str],
        limit: int,
        connect_timeout_s: float,
        retry_after_s: float,
    ) -> None:
        """`connect(deadline)` opens a connection or raises a PoolError."""
        self.name = name
        self._connect = connect
        self._namespace = namespace
        self._geometry = geometry
        self._connect_timeout_s = connect_timeout_s
        self._retry_after_s = retry_after_s
        self._free = threading.Semaphore(limit)
        self._lock = threading.Lock()
        self._idle: list[OpenConnection] = []
        self._generation = 0  # raised at every failure
        self._down = False
        self._closed = threading.Event()

    @property
    def up(self) -> bool:
        return not self._down and not self._closed.is_set()

    @contextmanager
    def borrow(self, deadline: float) -> Iterator[OpenConnection]:
        """A connection for one operation. A PoolUnavailable or PoolTimeout inside closes it and opens the
        breaker.

        Raises PoolUnavailable at once while the node is down, PoolTimeout when no connection came free in
        time.
        """
        self._check_up()
        if not self._free.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise PoolTimeout(f"pool node {self.name}: no connection came free in time")
        try:
            self._check_up()  # it may have failed while we waited
            if time.monotonic() >= deadline:
                # our own doing: must not count against the node
                raise PoolTimeout(f"pool node {self.name}: no time was left to ask it")
            with self._lend(deadline) as opened:
                yield opened
        finally:
            self._free.release()

    @contextmanager
    def _lend(self, deadline: float) -> Iterator[OpenConnection]:
        generation = self._generation
        opened: OpenConnection | None = None
        try:
            opened = self._take() or self._open(deadline)
            generation = opened.generation
            yield opened
        except PoolError as error:
            if opened is not None:
                opened.connection.close()
                opened = None
            self._fail(error, generation)
            raise
        except BaseException:
            # an operation cut short leaves the connection in an unknown state
            if opened is not None:
                opened.connection.close()
                opened = None
            raise
        finally:
            if opened is not None:
                self._give_back(opened)

    def check(self, deadline: float) -> None:
        """Connect and open the namespace now. Raises PoolUnavailable, PoolTimeout or PoolRefused (geometry
        mismatch).
        """
        with self.borrow(deadline):
            pass

    def close(self) -> None:
        """Close the idle connections and refuse new operations; those under way end by themselves."""
        with self._lock:
            self._closed.set()
            self._generation += 1
            idle, self._idle = self._idle, []
        for opened in idle:
            opened.connection.close()

    def _check_up(self) -> None:
        if self._closed.is_set():
            raise PoolUnavailable(f"pool node {self.name}: the client is closed")
        if self._down:
            raise PoolUnavailable(f"pool node {self.name} is down")

    def _take(self) -> OpenConnection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _open(self, deadline: float) -> OpenConnection:
        generation = self._generation
        connection = self._connect(min(deadline, time.monotonic() + self._connect_timeout_s))
        try:
            reply = connection.call(OpenNamespace(1, self._namespace, self._geometry), deadline)
        except BaseException:
            connection.close()
            raise
        if not isinstance(reply, Opened):
            connection.close()
            text = reply.message if isinstance(reply, Fault) else f"unexpected {type(reply).__name__}"
            raise PoolRefused(f"pool node {self.name}: {text}")
        return OpenConnection(connection, reply.namespace, generation)

    def _give_back(self, opened: OpenConnection) -> None:
        with self._lock:
            current = opened.generation == self._generation and not self._closed.is_set()
            if current:
                self._idle.append(opened)
        if not current:
            opened.connection.close()

    def _fail(self, error: PdserveError, generation: int) -> None:
        with self._lock:
            if generation != self._generation:
                return  # a connection of before a failure that is known already, and perhaps over
            self._generation += 1
            idle, self._idle = self._idle, []
            first = not self._down
            self._down = True
        for opened in idle:
            opened.connection.close()
        if first and not self._closed.is_set():
            logger.warning("pool node %s is down, its pages are recomputed: %s", self.name, error)
            threading.Thread(target=self._probe, name=f"pdserve-probe-{self.name}", daemon=True).start()

    def _probe(self) -> None:
        while not self._closed.wait(self._retry_after_s):
            try:
                opened = self._open(time.monotonic() + self._connect_timeout_s)
            except PoolError as error:
                logger.debug("pool node %s is still down: %s", self.name, error)
                continue
            except Exception:  # boundary of this thread: without a probe the node would stay down for good
                logger.exception("pool node %s: the probe failed, and is repeated", self.name)
                continue
            with self._lock:
                self._down = False
            self._give_back(opened)
            logger.info("pool node %s is up again", self.name)
            return
