"""The bounded pool of a client's connections to one node, for threads.

At most `limit` operations use the node at once; another one waits for a free connection, until its deadline.
`NodeHealth` (node_health.py) decides whether the node is tried. This module has its threads.

After a restart of the node, idle connections turn out to be closed at their next use. This is no failure: the
operation is repeated once on a new connection, if a repetition is harmless. A Commit whose answer was lost is
not repeated: its pages count as unstored.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

from pdserve.errors import (
    PoolError,
    PoolRefused,
    PoolRestarting,
    PoolTimeout,
    PoolUnavailable,
    RequestRefused,
)
from pdserve.kvpool.client.deadline import Deadline, Speed
from pdserve.kvpool.client.node_health import (
    PASSING,
    Asked,
    Cause,
    Close,
    DropIdle,
    Event,
    Log,
    Lost,
    NodeHealth,
    NodeState,
    NoRunner,
    Try,
    TryFailed,
    TrySucceeded,
    cause_of,
)
from pdserve.kvpool.namespaces.tenants import name_of
from pdserve.kvpool.protocol.frames import expected
from pdserve.kvpool.protocol.messages import ALL, WRITE, Opened, OpenNamespace, Reply, Request
from pdserve.kvpool.transports.base import Connection

logger = logging.getLogger(__name__)
T = TypeVar("T")

_TOO_LARGE: Final = (
    "pool node {0}: our pages have {1:,} bytes, and it takes pages of {2:,} bytes at most: "
    "set page_bytes = {1} on the node, or lower engine.page_size on all workers"
)


DROPPED: Final = "unknown_namespace"
OF_TENANT: Final = frozenset((DROPPED, "access_denied", "too_many_namespaces"))
"""Codes of Faults that are no fault of the node where a tenant's namespace is asked for."""


class OpenConnection:
    """A connection with the namespace opened on it, and those of tenants when they are first asked for."""

    def __init__(
        self,
        connection: Connection,
        namespace: int,
        generation: int,
        rights: int = ALL,
        *,
        name: str = "",
        geometry: dict[str, str] | None = None,
    ) -> None:
        self.connection = connection
        self.namespace = namespace  # of the tenant whose operation this is
        self.rights = rights  # rights of our token in the namespace: access.READ and so on
        self.generation = generation  # generation of the node's health when it was opened
        self.reused = False  # it was idle before this operation, so the node may have closed it
        self.answered = False  # the node has answered in this operation
        self.broken = False  # it failed after the operation had its result, which stays valid
        self._next_id = 1  # 1 was OpenNamespace
        self._name, self._geometry = name, geometry or {}
        self._numbers = {"": namespace}  # by tenant

    @property
    def node(self) -> str:
        """The node's name."""
        return self.connection.welcome.node

    def next_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def serve(self, tenant: str, deadline_s: float) -> None:
        """The next operation is the tenant's. Raises RequestRefused: the node has no namespace for it."""
        if tenant not in self._numbers:
            request = OpenNamespace(self.next_id(), name_of(self._name, tenant), self._geometry)
            opened = expected(self.connection.call(request, deadline_s), Opened, self.node)
            self._numbers[tenant] = opened.namespace
        self.namespace = self._numbers[tenant]

    def forget(self, tenant: str) -> None:
        """Its namespace was dropped: the next operation opens it again."""
        self._numbers.pop(tenant, None)

    @contextmanager
    def best_effort(self) -> Iterator[None]:
        """Context for messages after an operation has its result: an error only breaks the connection."""
        try:
            yield
        except PoolError as error:
            logger.debug("pool node %s: %s", self.node, error)
            self.broken = True

    def call(self, request: Request, deadline_s: float) -> Reply:
        """See `Connection.call`."""
        return self.call_all([request], deadline_s)[0]

    def call_all(self, requests: Sequence[Request], deadline_s: float) -> list[Reply]:
        """See `Connection.call_all`."""
        replies = self.connection.call_all(requests, deadline_s)
        self.answered = True
        return replies


class TenantRefused(RequestRefused):
    """The node has no namespace for a tenant. It serves others."""


class StaleConnection(PoolUnavailable):
    """An idle connection was found closed. It does not count against the node."""


class NodeLink:
    """A bounded set of connections to one node, governed by its NodeHealth. Thread-safe."""

    def __init__(
        self,
        name: str,
        connect: Callable[[float], Connection],
        *,
        namespace: str,
        geometry: dict[str, str],
        page_bytes: int = 0,
        limit: int,
        connect_timeout_s: float,
        retry_after_s: float,
        restart_wait_s: float = 3.0,
    ) -> None:
        """`connect(deadline_s)` opens a connection or raises a PoolError. `page_bytes`: a node that never
        takes pages of this size is refused; 0: unknown.
        """
        self.name = name
        self.speed = Speed()
        self.is_mapped = True
        """The node's memory is mapped here, and pages are copied, as far as is known."""
        self._connect = connect
        self._namespace = namespace
        self._geometry = geometry
        self._page_bytes = page_bytes
        self._connect_timeout_s = connect_timeout_s
        self._turns: SimpleQueue[None] = SimpleQueue()  # one for each connection that is not in use
        for _ in range(limit):
            self._turns.put(None)
        self._lock = threading.RLock()  # guards the attributes below
        self._changed = threading.Condition(self._lock)
        self._health = NodeHealth(name, retry_after_s=retry_after_s, restart_wait_s=restart_wait_s)
        self._idle: list[OpenConnection] = []
        self._closed = threading.Event()
        self._told_read_only = False

    @property
    def up(self) -> bool:
        return self._health.state is NodeState.UP

    @property
    def reachable(self) -> bool:
        """The node is up or restarting."""
        return self._health.reachable

    def use(
        self,
        deadline: Deadline,
        operation: Callable[[OpenConnection], T],
        *,
        repeatable: bool = True,
        tenant: str = "",
    ) -> T:
        """Run the operation with a connection. Raises its errors; PoolUnavailable at once while the node is
        down, PoolTimeout if no connection became free in time, and the errors of connecting.

        It is repeated once if the connection turns out to be closed, and again after an announced restart,
        which extends the deadline. `repeatable`: it may be repeated after the node has answered part of it. A
        restarting node has dropped all unfinished work, so then it is repeated in any case.
        """
        last, is_dropped = False, False
        while True:
            try:
                return self._use_once(deadline, operation, last=last, repeatable=repeatable, tenant=tenant)
            except TenantRefused as error:
                if is_dropped or error.code != DROPPED:
                    raise
                is_dropped = True
            except StaleConnection:
                last = True
            except PoolRestarting:
                deadline.put_off()
                if time.monotonic() >= deadline.at_s:
                    raise

    def _use_once(
        self,
        deadline: Deadline,
        operation: Callable[[OpenConnection], T],
        *,
        last: bool,
        repeatable: bool,
        tenant: str,
    ) -> T:
        """A PoolError of the operation closes its connection and makes the node DOWN, but a refusal of this
        request alone does not (node_health.py). Two errors mean that it is to be repeated: PoolRestarting,
        and, unless this is the `last` attempt, StaleConnection (an idle connection was found closed).
        """
        self._await_turn(deadline)
        generation = self._health.generation
        opened: OpenConnection | None = None
        try:
            opened = self._take() or self._open(deadline.at_s)
            generation = opened.generation
            opened.serve(tenant, deadline.at_s)
            result = operation(opened)
        except BaseException as error:
            of_tenant = tenant and isinstance(error, RequestRefused) and error.code in OF_TENANT
            if opened is not None and of_tenant and isinstance(error, RequestRefused):
                opened.forget(tenant)
                self._give_back(opened)
                raise TenantRefused(str(error), error.code) from error
            if opened is not None and isinstance(error, RequestRefused) and error.code in PASSING:
                self._give_back(opened)
                raise
            if opened is not None:  # an interrupted operation leaves it in an unknown state
                opened.connection.close()
            if not isinstance(error, PoolError):
                raise
            excusable = opened is not None and opened.reused and (repeatable or not opened.answered)
            cause = cause_of(error, connected=opened is not None, excusable=not last and excusable)
            self._start(self._feed(Lost(generation, cause, error)))
            if cause is Cause.STALE:
                raise StaleConnection(str(error)) from error
            raise
        else:
            self._give_back(opened)
            return result
        finally:
            self._turns.put(None)

    def _await_turn(self, deadline: Deadline) -> None:
        """Take one of the connections' turns, which the caller gives back. Raises as `use`."""
        self._check_usable(deadline)
        try:
            self._turns.get(timeout=max(0.0, deadline.at_s - time.monotonic()))
        except Empty:
            raise PoolTimeout(f"pool node {self.name}: no connection came free in time") from None
        try:
            self._check_usable(deadline)  # the node may have failed during the wait
            if time.monotonic() >= deadline.at_s:
                # caused by this process: it must not count against the node
                raise PoolTimeout(f"pool node {self.name}: no time was left to ask it")
        except BaseException:
            self._turns.put(None)
            raise

    def close(self) -> None:
        """Close idle connections and refuse new operations. Operations in progress end by themselves."""
        self._closed.set()
        self._feed(Close())

    def _check_usable(self, deadline: Deadline) -> None:
        """Wait while the node restarts. Raises PoolUnavailable if it is down, or PoolTimeout."""
        health = self._health
        if health.state is NodeState.UP:
            return
        if health.state is NodeState.RESTARTING:
            deadline.put_off()
            with self._changed:
                while health.state is NodeState.RESTARTING:
                    if not self._changed.wait(max(0.0, deadline.at_s - time.monotonic())):
                        raise PoolTimeout(f"pool node {self.name} is restarting")
        if health.state is NodeState.DOWN:
            self._start(self._feed(Asked()))
        health.check()

    def _take(self) -> OpenConnection | None:
        with self._lock:
            opened = self._idle.pop() if self._idle else None
        if opened is not None:
            opened.reused, opened.answered = True, False
        return opened

    def _open(self, deadline_s: float) -> OpenConnection:
        generation = self._health.generation
        connection = self._connect(min(deadline_s, time.monotonic() + self._connect_timeout_s))
        self.is_mapped = connection.is_mapped
        try:
            request = OpenNamespace(1, self._namespace, self._geometry)
            reply = expected(connection.call(request, deadline_s), Opened, self.name)
            if 0 < reply.largest_page_bytes < self._page_bytes:
                raise PoolRefused(_TOO_LARGE.format(self.name, self._page_bytes, reply.largest_page_bytes))
        except BaseException:
            connection.close()
            raise
        if not reply.rights & WRITE and not self._told_read_only:
            self._told_read_only = True
            text = "pool node %s: our token only reads namespace %s: pages are not written"
            logger.warning(text, self.name, self._namespace)
        return OpenConnection(
            *(connection, reply.namespace, generation, reply.rights),
            name=self._namespace,
            geometry=self._geometry,
        )

    def _give_back(self, opened: OpenConnection) -> None:
        with self._lock:
            usable = opened.generation == self._health.generation and not opened.broken
            usable = usable and self._health.state is not NodeState.CLOSED
            if usable:
                self._idle.append(opened)
        if not usable:
            opened.connection.close()

    # --- the health's runner

    def _feed(self, event: Event) -> Try | None:
        """Pass an event to the health. Returns the Try that it wants, if any."""
        attempt: Try | None = None
        dropped: list[OpenConnection] = []
        with self._changed:
            for action in self._health.handle(event, time.monotonic()):
                if isinstance(action, DropIdle):
                    dropped, self._idle = self._idle, []
                elif isinstance(action, Log):
                    logger.log(action.level, "pool node %s %s", self.name, action.text)
                else:
                    attempt = action
            self._changed.notify_all()
        for opened in dropped:
            opened.connection.close()
        return attempt

    def _start(self, attempt: Try | None) -> None:
        if attempt is None:
            return
        name = f"pdserve-probe-{self.name}"
        try:
            threading.Thread(target=self._probe, args=(attempt,), name=name, daemon=True).start()
        except RuntimeError:  # no thread can be started
            self._feed(NoRunner())

    def _probe(self, attempt: Try | None) -> None:
        while attempt is not None:
            if self._closed.wait(max(0.0, attempt.at_s - time.monotonic())):
                return
            attempt = self._try()

    def _try(self) -> Try | None:
        """Connect. On success the node is up."""
        try:
            opened = self._open(time.monotonic() + self._connect_timeout_s)
        except PoolError as error:
            logger.debug("pool node %s is still down: %s", self.name, error)
            return self._feed(TryFailed())
        except Exception:  # boundary of this thread: without further tries the node would stay down
            logger.exception("pool node %s: the probe failed, and is repeated", self.name)
            return self._feed(TryFailed())
        attempt = self._feed(TrySucceeded())
        self._give_back(opened)
        return attempt
