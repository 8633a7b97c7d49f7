"""A client's one connection to a node in an event loop, shared by all tasks.

`NodeHealth` (node_health.py) decides whether the node is tried, as for the threads' client. There are two
differences. Tasks share the connection, so a request without an answer ends it only if no other bytes came
meanwhile. A time-out that passed while the loop was busy does not count against the node.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeAlias

from pdserve.errors import (
    PoolError,
    PoolRefused,
    PoolRestarting,
    PoolTimeout,
    PoolUnavailable,
    RequestRefused,
)
from pdserve.kvpool.client.deadline import Deadline
from pdserve.kvpool.client.node_health import (
    PASSING,
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
from pdserve.kvpool.protocol.frames import refused
from pdserve.kvpool.protocol.messages import Fault, Reply, Request
from pdserve.kvpool.transports.async_control import AsyncControl, LastWordsLost
from pdserve.kvpool.transports.session import hung_up

logger = logging.getLogger(__name__)
MakeRequest: TypeAlias = Callable[[int, int], Request]  # id, namespace

RECONNECT_S: Final = 0.02  # pause after the node reset a connection before it read our Hello
OVERSLEPT_S: Final = 0.1


class AsyncNodeLink:
    """The link to one node. Used in one event loop."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], Awaitable[AsyncControl]],
        *,
        connect_timeout_s: float,
        patience_s: float,
        retry_after_s: float,
        restart_wait_s: float,
    ) -> None:
        """The arguments:

        - `connect()` opens a connection with our namespace, or raises a PoolError. Its time is bounded here.
        - `patience_s`: a node that is silent for this long has failed.
        """
        self.name = name
        self._connect = connect
        self._connect_timeout_s = connect_timeout_s
        self._patience_s = patience_s
        self._health = NodeHealth(name, retry_after_s=retry_after_s, restart_wait_s=restart_wait_s)
        self._settled = asyncio.Event()  # set while the health is not RESTARTING
        self._settled.set()
        self._connecting = asyncio.Lock()
        self._control: AsyncControl | None = None
        self._generation = 0  # the health's generation when `_control` was opened
        self._probing: asyncio.Task[None] | None = None

    @property
    def reachable(self) -> bool:
        """The node is up or restarting."""
        return self._health.reachable

    async def ask(self, make: MakeRequest, deadline: Deadline, name: str = "") -> Reply:
        """Send a request and return the node's reply. `name`: see `AsyncControl.number_of`.

        A connection that the node has closed is replaced once, and an announced restart is waited for.
        Neither counts against the node. Raises PoolUnavailable (at once while the node is down), PoolTimeout,
        PoolRefused, FrameError.
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
                reply = await self._bounded(control, generation, make, deadline.at_s, name)
                is_gone = isinstance(reply, Fault) and reply.code == "unknown_namespace"
                if is_gone and control.forgets(name):  # the tenant's pages were deleted
                    reply = await self._bounded(control, generation, make, deadline.at_s, name)
                return reply
            except PoolUnavailable as error:
                excusable = excused and (not is_new or isinstance(error, LastWordsLost))
                cause = cause_of(error, connected=True, excusable=excusable)
                self._lose(generation, cause, error)
                if cause is Cause.STALE:
                    excused = False
                elif cause is not Cause.RESTARTING or not self._put_off(deadline):
                    raise

    def refused(self, reply: Reply) -> PoolRefused:
        """The error for a reply of the wrong kind, for example after the namespace was dropped.

        The next connection opens the namespace again.
        """
        error = refused(reply, self.name)
        if not isinstance(error, RequestRefused) or error.code not in PASSING:
            self._lose(self._generation, cause_of(error, connected=True, excusable=False), error)
        return error

    def close(self) -> None:
        """Close the link. Idempotent. Requests in progress end with PoolUnavailable."""
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
                # other tasks used the time to connect: it does not count against the node
                raise PoolTimeout(f"pool node {self.name}: no time was left to ask it")
            return await self._open(deadline.at_s), self._generation, True

    def _alive(self) -> AsyncControl | None:
        control = self._control
        return control if control is not None and not control.broken else None

    async def _open(self, deadline_s: float) -> AsyncControl:
        """Connect for an operation. An error counts against the node. Raises PoolError."""
        generation = self._health.generation
        until_s = min(deadline_s, time.monotonic() + self._connect_timeout_s)
        try:
            async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                control = await self._connect_again()
        except TimeoutError:
            error = PoolTimeout(f"pool node {self.name} does not answer")
            if time.monotonic() <= until_s + OVERSLEPT_S:  # else this process's loop was too busy
                self._lose(generation, Cause.FAILED, error)
            raise error from None
        except PoolError as error:
            self._lose(generation, cause_of(error, connected=False, excusable=False), error)
            raise
        return self._keep(control, generation)

    async def _connect_again(self) -> AsyncControl:
        """Connect; try once more if the node reset the connection, since its reason may be lost."""
        try:
            return await self._connect()
        except LastWordsLost:
            await asyncio.sleep(RECONNECT_S)
            return await self._connect()

    def _keep(self, control: AsyncControl, generation: int) -> AsyncControl:
        """Store the new connection. Raises PoolUnavailable if the client was closed meanwhile."""
        if self._health.state is NodeState.CLOSED:
            control.close()
            self._health.check()
        if self._control is not None:
            self._control.close()
        control.on_fault = partial(self._on_fault, generation)
        self._control, self._generation = control, generation
        return control

    def _on_fault(self, generation: int, fault: Fault) -> None:
        """The node closed the connection with a Fault. The wait for an announced restart starts now."""
        error = hung_up(self.name, fault)
        if isinstance(error, PoolRestarting):
            self._lose(generation, Cause.RESTARTING, error)

    async def _bounded(
        self, control: AsyncControl, generation: int, make: MakeRequest, deadline_s: float, name: str
    ) -> Reply:
        asked_s = time.monotonic()
        left_s = deadline_s - asked_s
        if left_s <= 0:
            raise PoolTimeout(f"pool node {self.name}: connecting took all the time")
        try:
            number = await control.number_of(name, left_s)
            return await control.call(lambda i: make(i, number), left_s)
        except TimeoutError:
            error = PoolTimeout(f"pool node {self.name} did not answer in {left_s:.1f} s")
            # not after a later message, nor after a very short time: other tasks wait on this connection
            if control.read_s < asked_s and time.monotonic() - asked_s >= self._patience_s:
                self._lose(generation, Cause.FAILED, error)
            raise error from None

    def _put_off(self, deadline: Deadline) -> bool:
        """The node restarts: extend the deadline. True if there is time left to wait."""
        deadline.put_off()
        return time.monotonic() < deadline.at_s

    # --- the health's runner

    def _lose(self, generation: int, cause: Cause, error: PoolError) -> None:
        attempt = self._feed(Lost(generation, cause, error))
        if attempt is not None:
            self._probing = asyncio.get_running_loop().create_task(self._probe(attempt))

    def _feed(self, event: Event) -> Try | None:
        """Pass an event to the health. Returns the Try that it wants, if any."""
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
            await asyncio.sleep(max(0.0, attempt.at_s - time.monotonic()))
            attempt = await self._try()

    async def _try(self) -> Try | None:
        """Connect. On success the node is up."""
        generation = self._health.generation
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                control = await self._connect()
            self._keep(control, generation)
        except (TimeoutError, PoolError) as error:
            logger.debug("pool node %s is still down: %s", self.name, error)
            return self._feed(TryFailed())
        except Exception:  # boundary of this task: without further tries the node would stay down
            logger.exception("pool node %s: the probe failed, and is repeated", self.name)
            return self._feed(TryFailed())
        return self._feed(TrySucceeded())
