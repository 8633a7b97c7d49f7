"""A client's connections to one node, and whether to try it at all.

    UP          operations borrow a connection, at most `limit` at once; who finds none free waits for one,
                until its deadline
    RESTARTING  the node said that it would be back in a moment (an upgrade): operations wait for it, their
                deadline put off by `restart_wait_s` (deadline.py), while a thread connects anew for that long
    DOWN        after one failure every operation is refused at once, without touching the network, and a
                thread tries the node every `retry_after_s` until a connection succeeds. Where there is
                nobody to connect to, trying costs next to nothing and a restart is likely: such a node is
                tried whenever it has been away for a twentieth longer

So a dead pool costs a request one short deadline in all, not one per page, and a node that came back is
noticed without a request paying for the attempt.

A node that was killed and started again leaves connections here that are closed at their first use. That is
no failure yet: the operation is repeated once, on a new connection, where repeating it can do no harm. A lost
answer to Commit is not asked for again: its pages count as unstored.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from pdserve.errors import (
    PdserveError,
    PoolError,
    PoolRestarting,
    PoolTimeout,
    PoolUnavailable,
)
from pdserve.kvpool.client.deadline import Deadline
from pdserve.kvpool.protocol.frames import expected
from pdserve.kvpool.protocol.messages import ALL, WRITE, Opened, OpenNamespace, Reply, Request
from pdserve.kvpool.transports.base import Connection

logger = logging.getLogger(__name__)
T = TypeVar("T")

RESTART_RETRY_S: Final = 0.02
RETRY_SHARE: Final = 0.05  # of the time that a node has been away


class LinkState(enum.Enum):
    """See above."""

    UP = "up"
    RESTARTING = "restarting"
    DOWN = "down"


class OpenConnection:
    """A connection with the namespace opened on it."""

    def __init__(self, connection: Connection, namespace: int, generation: int, rights: int = ALL) -> None:
        self.connection = connection
        self.namespace = namespace
        self.rights = rights  # of our token in the namespace: READ and so on
        self.generation = generation  # of the link when it was opened; an older one is closed, not reused
        self.reused = False  # it was idle before this operation: the node may have gone meanwhile
        self.answered = False  # the node has answered in this operation
        self.broken = False  # when the operation had all that it wanted: it stands
        self._next_id = 1  # 1 was OpenNamespace

    @property
    def node(self) -> str:
        """The node's name."""
        return self.connection.welcome.node

    def next_id(self) -> int:
        self._next_id += 1
        return self._next_id

    @contextmanager
    def best_effort(self) -> Iterator[None]:
        """What is said here, once an operation has all that it wanted, may fail: it costs the connection."""
        try:
            yield
        except PoolError as error:
            logger.debug("pool node %s: %s", self.node, error)
            self.broken = True

    def call(self, request: Request, deadline: float) -> Reply:
        """As `Connection.call`."""
        reply = self.connection.call(request, deadline)
        self.answered = True
        return reply


class StaleConnection(PoolUnavailable):
    """An idle connection was found closed; says nothing of the node."""


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
        restart_wait_s: float = 3.0,
        on_lost: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`connect(deadline)` opens a connection or raises a PoolError. `on_lost(name)` is called by the
        background thread before each attempt at a node that is down.
        """
        self.name = name
        self.outstanding_bytes = 0  # of page reads under way
        self._connect = connect
        self._namespace = namespace
        self._geometry = geometry
        self._connect_timeout_s = connect_timeout_s
        self._retry_after_s = retry_after_s
        self._restart_wait_s = restart_wait_s
        self._on_lost = on_lost
        self._free = threading.Semaphore(limit)
        self._changed = threading.Condition()
        self._idle: list[OpenConnection] = []
        self._generation = 0  # raised at every failure
        self._state = LinkState.UP
        self._closed = threading.Event()
        self._told_read_only = False
        self._start_probe_at_s = float("inf")  # no thread could be had for it: when a use starts it

    @property
    def up(self) -> bool:
        return self._state is LinkState.UP and not self._closed.is_set()

    @property
    def reachable(self) -> bool:
        """Up, or back in a moment."""
        return self._state is not LinkState.DOWN and not self._closed.is_set()

    def use(
        self, deadline: Deadline, operation: Callable[[OpenConnection], T], *, repeatable: bool = True
    ) -> T:
        """Run the operation with a connection; once more if the connection turns out to have been closed,
        and again after an announced restart, which puts the deadline off.

        `repeatable`: it may be repeated after the node has answered part of it. A restarting node has let go
        of all that was unfinished, so then it is repeated in any case. Raises what `acquire` raises.
        """
        last = False
        while True:
            try:
                with self.acquire(deadline, last=last, repeatable=repeatable) as opened:
                    return operation(opened)
            except StaleConnection:
                last = True
            except PoolRestarting:
                deadline.put_off()
                if time.monotonic() >= deadline.at_s:
                    raise

    @contextmanager
    def acquire(
        self, deadline: Deadline, *, last: bool = True, repeatable: bool = True
    ) -> Iterator[OpenConnection]:
        """A connection for one operation. A PoolUnavailable or PoolTimeout inside closes it and opens the
        breaker, but for two: PoolRestarting, and, unless this is the `last` attempt, a closed connection that
        was idle before (StaleConnection). Both ask for the operation to be repeated.

        Raises PoolUnavailable at once while the node is down, PoolTimeout when no connection came free in
        time.
        """
        self._check_usable(deadline)
        if not self._free.acquire(timeout=max(0.0, deadline.at_s - time.monotonic())):
            raise PoolTimeout(f"pool node {self.name}: no connection came free in time")
        try:
            self._check_usable(deadline)  # it may have failed while we waited
            if time.monotonic() >= deadline.at_s:
                # our own doing: must not count against the node
                raise PoolTimeout(f"pool node {self.name}: no time was left to ask it")
            with self._checked_out(deadline.at_s, last, repeatable) as opened:
                yield opened
        finally:
            self._free.release()

    @contextmanager
    def _checked_out(self, deadline: float, last: bool, repeatable: bool) -> Iterator[OpenConnection]:
        generation = self._generation
        opened: OpenConnection | None = None
        try:
            opened = self._take() or self._open(deadline)
            generation = opened.generation
            yield opened
        except PoolError as error:
            stale, gone = False, opened is None and isinstance(error, PoolUnavailable)
            if opened is not None:
                stale = opened.reused and not last and (repeatable or not opened.answered)
                stale = stale and isinstance(error, PoolUnavailable)
                opened.connection.close()
                opened = None
            if isinstance(error, PoolRestarting):
                self._await_restart(error, generation)
            elif stale:
                self._drop_idle(generation)
                raise StaleConnection(str(error)) from error
            else:
                self._fail(error, generation, gone=gone)
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

    @contextmanager
    def busy(self, size_bytes: int) -> Iterator[None]:
        """So many bytes are being read from the node meanwhile."""
        with self._changed:
            self.outstanding_bytes += size_bytes
        try:
            yield
        finally:
            with self._changed:
                self.outstanding_bytes -= size_bytes

    def check(self, deadline: Deadline) -> None:
        """Connect and open the namespace now. Raises PoolUnavailable, PoolTimeout or PoolRefused (geometry
        mismatch).
        """
        with self.acquire(deadline):
            pass

    def close(self) -> None:
        """Close the idle connections and refuse new operations; those under way end by themselves."""
        with self._changed:
            self._closed.set()
            self._generation += 1
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for opened in idle:
            opened.connection.close()

    def _check_usable(self, deadline: Deadline) -> None:
        """Wait while the node restarts. Raises PoolUnavailable when it is down, PoolTimeout."""
        if self._state is LinkState.RESTARTING:
            deadline.put_off()
            with self._changed:
                while self._state is LinkState.RESTARTING and not self._closed.is_set():
                    if not self._changed.wait(max(0.0, deadline.at_s - time.monotonic())):
                        raise PoolTimeout(f"pool node {self.name} is restarting")
        if self._closed.is_set():
            raise PoolUnavailable(f"pool node {self.name}: the client is closed")
        if self._state is LinkState.DOWN:
            if time.monotonic() >= self._start_probe_at_s:
                self._start_late()
            raise PoolUnavailable(f"pool node {self.name} is down")

    def _take(self) -> OpenConnection | None:
        with self._changed:
            opened = self._idle.pop() if self._idle else None
        if opened is not None:
            opened.reused, opened.answered = True, False
        return opened

    def _open(self, deadline: float) -> OpenConnection:
        generation = self._generation
        connection = self._connect(min(deadline, time.monotonic() + self._connect_timeout_s))
        try:
            request = OpenNamespace(1, self._namespace, self._geometry)
            reply = expected(connection.call(request, deadline), Opened, self.name)
        except BaseException:
            connection.close()
            raise
        if not reply.rights & WRITE and not self._told_read_only:
            self._told_read_only = True
            logger.warning(
                "pool node %s: our token only reads namespace %s: pages are not written",
                self.name,
                self._namespace,
            )
        return OpenConnection(connection, reply.namespace, generation, reply.rights)

    def _give_back(self, opened: OpenConnection) -> None:
        with self._changed:
            current = opened.generation == self._generation and not self._closed.is_set()
            current = current and not opened.broken
            if current:
                self._idle.append(opened)
        if not current:
            opened.connection.close()

    # --- when the node does not answer

    def _drop_idle(self, generation: int) -> None:
        """One of these connections was found closed: so are the others, most likely."""
        self._enter(generation, LinkState.UP)

    def _await_restart(self, error: PdserveError, generation: int) -> None:
        if self._enter(generation, LinkState.RESTARTING):
            logger.info("pool node %s: %s", self.name, error)
            self._start(self._probe_restarting)

    def _fail(self, error: PdserveError, generation: int, *, gone: bool) -> None:
        """`gone`: nobody could be connected to."""
        if self._enter(generation, LinkState.DOWN):
            logger.warning("pool node %s is down, its pages are recomputed: %s", self.name, error)
            self._start(lambda: self._probe(gone=gone))

    def _enter(self, generation: int, state: LinkState) -> bool:
        """Close the idle connections and enter `state`; whether that is news. Nothing happens for a
        connection of before a failure that is known already, and perhaps over.
        """
        with self._changed:
            if generation != self._generation or self._closed.is_set():
                return False
            self._generation += 1
            idle, self._idle = self._idle, []
            first = self._state is LinkState.UP
            if first:  # else a thread looks after the node already
                self._state = state
        for opened in idle:
            opened.connection.close()
        return first

    def _start(self, probe: Callable[[], None]) -> None:
        try:
            threading.Thread(target=probe, name=f"pdserve-probe-{self.name}", daemon=True).start()
        except RuntimeError as error:
            logger.warning("pool node %s is not tried for now: %s", self.name, error)
            with self._changed:
                self._state = LinkState.DOWN
                self._start_probe_at_s = time.monotonic() + self._retry_after_s
                self._changed.notify_all()

    def _start_late(self) -> None:
        with self._changed:
            due = self._start_probe_at_s <= time.monotonic()
            self._start_probe_at_s = float("inf")
        if due:  # else another thread was first
            self._start(lambda: self._probe(gone=True))

    def _probe_restarting(self) -> None:
        until_s = time.monotonic() + self._restart_wait_s
        pause_s = 0.0
        while time.monotonic() < until_s and not self._closed.wait(pause_s):
            if self._try():
                return
            pause_s = RESTART_RETRY_S
        with self._changed:
            self._state = LinkState.DOWN
            self._changed.notify_all()
        if not self._closed.is_set():
            text = "pool node %s did not come back within %.0f s: it is down, its pages are recomputed"
            logger.warning(text, self.name, self._restart_wait_s)
        self._probe()

    def _probe(self, *, gone: bool = False) -> None:
        since_s, tell_at_s = time.monotonic(), 0.0
        while not self._closed.is_set():
            now_s = time.monotonic()
            if now_s >= tell_at_s:
                tell_at_s = now_s + self._retry_after_s
                self._on_lost(self.name)
            pause_s = self._retry_after_s
            if gone:
                pause_s = min(pause_s, max(RESTART_RETRY_S, RETRY_SHARE * (now_s - since_s)))
            if self._closed.wait(pause_s) or self._try():
                return

    def _try(self) -> bool:
        """Connect; if that succeeds the node is up."""
        try:
            opened = self._open(time.monotonic() + self._connect_timeout_s)
        except PoolError as error:
            logger.debug("pool node %s is still down: %s", self.name, error)
            return False
        except Exception:  # boundary of this thread: without a probe the node would stay down for good
            logger.exception("pool node %s: the probe failed, and is repeated", self.name)
            return False
        with self._changed:
            self._state = LinkState.UP
            self._changed.notify_all()
        self._give_back(opened)
        logger.info("pool node %s is up again", self.name)
        return True
