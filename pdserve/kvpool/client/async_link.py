"""A client's connection to one node, for an event loop: one, shared by all tasks, behind the node's health.

Whether the node is tried at all is decided by `NodeHealth` (node_health.py), as for the client of threads.
What differs is what the loop brings with it: tasks share the connection, so one question without an answer
condemns it only if nothing else came meanwhile; and a time-out that passed while the loop was busy says
nothing of the node.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeAlias

from pdserve.errors import PoolError, PoolRefused, PoolRestarting, PoolTimeout, PoolUnavailable
from pdserve.kvpool.client.deadline import Deadline
from pdserve.kvpool.client.node_health import (
    Cause,
    Close,
    DropIdle,
    Event,
    Log,
    Lost,
    NodeHealth,
    NodeState,
    Try,
    TryFailed,
    TrySucceeded,
    cause_of,
)
from pdserve.kvpool.protocol.frames import refusal
from pdserve.kvpool.protocol.messages import Fault, Reply, Request
from pdserve.kvpool.transports.async_control import AsyncControl, LastWordsLost
from pdserve.kvpool.transports.session import hung_up

logger = logging.getLogger(__name__)
MakeRequest: TypeAlias = Callable[[int, int], Request]  # id, namespace

RECONNECT_S: Final = 0.02  # after a connection that the node reset before it read our Hello
OVERSLEPT_S: Final = 0.1


class AsyncNodeLink:
    """One node; lives in one event loop."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], Awaitable[AsyncControl]],
        *,
        connect_timeout_s: float,
        patience_s: float,
        retry_after_s: float,
        restart_wait_s: float,
        on_lost: Callable[[str], None],
    ) -> None:
        """`connect()` opens a connection with our namespace, or raises a PoolError; its time is bounded here.
        A node that is silent for `patience_s` has failed. `on_lost(name)` is called again and again while the
        node is down.
        """
        self.name = name
        self._connect = connect
        self._connect_timeout_s = connect_timeout_s
        self._patience_s = patience_s
        self._on_lost = on_lost
        self._health = NodeHealth(name, retry_after_s=retry_after_s, restart_wait_s=restart_wait_s)
        self._settled = asyncio.Event()  # not RESTARTING
        self._settled.set()
        self._connecting = asyncio.Lock()
        self._control: AsyncControl | None = None
        self._generation = 0  # of the health when `_control` was opened
        self._probing: asyncio.Task[None] | None = None

    @property
    def reachable(self) -> bool:
        """Up, or back in a moment."""
        return self._health.reachable

    async def ask(self, make: MakeRequest, deadline: Deadline) -> Reply:
        """The node's reply. A connection that turns out to have been closed is replaced once, an announced
        restart is waited for; neither counts against the node. Raises PoolUnavailable (at once while the node
        is down), PoolTimeout, PoolRefused, FrameError.
        """
        excused = True
        while True:
            try:
                control, generation, is_new = await self._acquire(deadline)
            except PoolRestarting:
                if not self._put_off(deadline):
                    raise
                continue
            try:
                return await self._bounded(control, generation, make, deadline.at_s)
            except PoolUnavailable as error:
                excusable = excused and (not is_new or isinstance(error, LastWordsLost))
                cause = cause_of(error, connected=True, excusable=excusable)
                self._lose(generation, cause, error)
                if cause is Cause.STALE:
                    excused = False
                elif cause is not Cause.RESTARTING or not self._put_off(deadline):
                    raise

    def refused(self, reply: Reply) -> PoolRefused:
        """The error for a reply that was not asked for: of a namespace that was dropped, say. The next
        connection opens it again.
        """
        error = PoolRefused(f"pool node {self.name}: {refusal(reply)}")
        self._lose(self._generation, Cause.FAILED, error)
        return error

    def close(self) -> None:
        """Idempotent. What is under way ends with PoolUnavailable."""
        self._feed(Close())
        if self._probing is not None:
            self._probing.cancel()

    # --- connections

    async def _acquire(self, deadline: Deadline) -> tuple[AsyncControl, int, bool]:
        """The connection, its generation, and whether it is new. Raises PoolError."""
        if self._health.state is NodeState.RESTARTING:
            deadline.put_off()
            try:
                async with asyncio.timeout(max(0.0, deadline.at_s - time.monotonic())):
                    await self._settled.wait()
            except TimeoutError:
                raise PoolTimeout(f"pool node {self.name} is restarting") from None
        self._health.check()
        if (control := self._alive()) is not None:
            return control, self._generation, False
        async with self._connecting:
            self._health.check()
            if (control := self._alive()) is not None:
                return control, self._generation, False
            if time.monotonic() >= deadline.at_s:
                # others took it, connecting: that says nothing of the node
                raise PoolTimeout(f"pool node {self.name}: no time was left to ask it")
            return await self._open(deadline.at_s), self._generation, True

    def _alive(self) -> AsyncControl | None:
        control = self._control
        return control if control is not None and not control.broken else None

    async def _open(self, deadline_s: float) -> AsyncControl:
        """For an operation: what goes wrong counts against the node. Raises PoolError."""
        generation = self._health.generation
        until_s = min(deadline_s, time.monotonic() + self._connect_timeout_s)
        try:
            async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                control = await self._connect_again()
        except TimeoutError:
            error = PoolTimeout(f"pool node {self.name} does not answer")
            if time.monotonic() <= until_s + OVERSLEPT_S:  # else the loop was busy: our own doing
                self._lose(generation, Cause.FAILED, error)
            raise error from None
        except PoolError as error:
            self._lose(generation, cause_of(error, connected=False, excusable=False), error)
            raise
        return self._keep(control, generation)

    async def _connect_again(self) -> AsyncControl:
        """`connect`, once more where the node reset the connection: it may have said why."""
        try:
            return await self._connect()
        except LastWordsLost:
            await asyncio.sleep(RECONNECT_S)
            return await self._connect()

    def _keep(self, control: AsyncControl, generation: int) -> AsyncControl:
        """Raises PoolUnavailable: the client has been closed meanwhile."""
        if self._health.state is NodeState.CLOSED:
            control.close()
            self._health.check()
        if self._control is not None:
            self._control.close()
        control.on_fault = partial(self._on_fault, generation)
        self._control, self._generation = control, generation
        return control

    def _on_fault(self, generation: int, fault: Fault) -> None:
        """The node hung up, perhaps while nobody asked: a restart is then waited for from now on."""
        error = hung_up(self.name, fault)
        if isinstance(error, PoolRestarting):
            self._lose(generation, Cause.RESTARTING, error)

    async def _bounded(
        self, control: AsyncControl, generation: int, make: MakeRequest, deadline_s: float
    ) -> Reply:
        asked_s = time.monotonic()
        left_s = deadline_s - asked_s
        if left_s <= 0:
            raise PoolTimeout(f"pool node {self.name}: connecting took all the time")
        try:
            return await control.call(lambda i: make(i, control.namespace), left_s)
        except TimeoutError:
            error = PoolTimeout(f"pool node {self.name} did not answer in {left_s:.1f} s")
            # not if it has said something else meanwhile, or was given next to no time: others wait here
            if control.read_s < asked_s and time.monotonic() - asked_s >= self._patience_s:
                self._lose(generation, Cause.FAILED, error)
            raise error from None

    def _put_off(self, deadline: Deadline) -> bool:
        """The node restarts: whether there is time to wait for it."""
        deadline.put_off()
        return time.monotonic() < deadline.at_s

    # --- the health's runner

    def _lose(self, generation: int, cause: Cause, error: PoolError) -> None:
        attempt = self._feed(Lost(generation, cause, error))
        if attempt is not None:
            self._probing = asyncio.get_running_loop().create_task(self._probe(attempt))

    def _feed(self, event: Event) -> Try | None:
        """Tell the health; what it wants to be tried."""
        attempt: Try | None = None
        for action in self._health.handle(event, time.monotonic()):
            if isinstance(action, DropIdle):
                if self._control is not None:
                    self._control.close()
                    self._control = None
            elif isinstance(action, Log):
                logger.log(action.level, "pool node %s %s", self.name, action.text)
            else:
                attempt = action
        if self._health.state is NodeState.RESTARTING:
            self._settled.clear()
        else:
            self._settled.set()
        return attempt

    async def _probe(self, attempt: Try | None) -> None:
        while attempt is not None:
            if attempt.lost:
                self._on_lost(self.name)
            await asyncio.sleep(max(0.0, attempt.at_s - time.monotonic()))
            attempt = await self._try()

    async def _try(self) -> Try | None:
        """Connect; if that succeeds the node is up."""
        generation = self._health.generation
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                control = await self._connect()
            self._keep(control, generation)
        except (TimeoutError, PoolError) as error:
            logger.debug("pool node %s is still down: %s", self.name, error)
            return self._feed(TryFailed())
        except Exception:  # boundary of this task: without a probe the node would stay down for good
            logger.exception("pool node %s: the probe failed, and is repeated", self.name)
            return self._feed(TryFailed())
        return self._feed(TrySucceeded())
