"""Replacing a running node by its new version without a failed operation (`pdserve pool upgrade`, SIGHUP).

    1. check       a child process of the new version runs the node's own command with `--check`: the
                   configuration is parsed, all modules are loaded, the memory can be taken over. Otherwise
                   the node continues as it is, and says why.
    2. wait        clients with unfinished operations (reservations, transfers, pins) may show that they are
                   active, for QUIESCE_S at most. Everybody is served meanwhile. A client that was stopped, or
                   hangs, does not hold up the others.
    3. quiesce     each client is told "upgrading" as soon as it has nothing unfinished. It connects again and
                   waits. Unfinished operations have QUIESCE_S to end, those of silent clients have no time.
                   What has not ended is treated as after a crash (quarantined, or a miss for its reader).
    4. hand over   the memory is let go, the process executes the new version (handover.py).

After step 1 there is no way back: if the exec fails, the process ends and its pages stay in memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import msgspec
from msgspec.structs import replace

from pdserve.errors import NodeFailed, PdserveError
from pdserve.kvpool.core.state import NodeState
from pdserve.kvpool.node.config import PoolNodeConfig
from pdserve.kvpool.node.memory.arena import why_not_reusable
from pdserve.kvpool.node.memory.placement import MIN_SLOT_BYTES
from pdserve.kvpool.node.serving.connection import ClientConnection, Connections
from pdserve.kvpool.node.upgrade.handover import Handover, command, gap_ms, hold_signals
from pdserve.kvpool.protocol.cluster_messages import Drain, Upgrade
from pdserve.kvpool.protocol.messages import Abort, Commit, Done, Fault, Release, Request
from pdserve.kvpool.protocol.slot_table import TableLayout

logger = logging.getLogger(__name__)

CHECK: Final = "--check"
LOAD_S: Final = 60.0  # for the new version to load
QUIESCE_S: Final = 2.0
POLL_S: Final = 0.002
CONCLUDING: Final = (Commit, Abort, Release)  # they end what is unfinished


class UpgradeError(PdserveError):
    """The new version would not start; the node continues as it is."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Which node a configuration starts."""

    name: str
    arena_dir: str


def start_of(config: PoolNodeConfig) -> Start:
    """Which node a configuration starts."""
    return Start(name=config.name, arena_dir=str(config.arena_dir.absolute()))


def check_start(config: PoolNodeConfig) -> Start:
    """Whether the node would start on the pages that there are. Raises UpgradeError, StartupError."""
    directory = config.arena_dir / config.name
    layout = TableLayout(config.capacity, config.slab, MIN_SLOT_BYTES)
    reason = why_not_reusable(directory, config.placement.home(directory), layout)
    if reason:
        raise UpgradeError(f"it cannot take over the pages in {directory}: {reason}")
    return start_of(config)


class Host(Protocol):
    """What an upgrade asks of its node."""

    config: PoolNodeConfig
    all_connections: Connections
    state: NodeState

    def make_handover(self) -> Handover:
        """Copies of all that the next program needs. Raises OSError; then there are none."""
        ...

    async def stop_moving(self) -> None:
        """Ask other nodes for no more pages."""
        ...

    def stop(self) -> None:
        """End the event loop."""
        ...

    def fail(self, error: PdserveError) -> None:
        """End the event loop by this error; the pages stay."""
        ...


class Upgrader:
    """One upgrade at a time; lives in the node's loop."""

    def __init__(self, node: Host) -> None:
        self._node = node
        self._next: Handover | None = None  # for this process's next program
        self._task: asyncio.Task[None] | None = None
        self.goodbye_fault: Fault | None = None  # sent to all clients from now on; None: the node serves
        self.hands_over = False  # the node ends for the next program to take over

    def begin(self, connection: ClientConnection, request: Upgrade) -> None:
        """A client with the right to do so asks for the upgrade."""
        if self._under_way:
            connection.send(Fault(request.id, "upgrade_failed", "an upgrade is under way already"))
            return
        self._start(lambda reply: connection.send(reply), request.id)

    def on_signal(self) -> None:
        """SIGHUP asks for the upgrade. The log says what becomes of it."""
        if not self._under_way:
            self._start(lambda _: None, 0)

    def _start(self, answer: Callable[[Done | Fault], object], request: int) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(answer, request))
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A bug in an upgrade is seen: the node serves on, or ends where clients were sent away."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        name = self._node.config.name
        logger.critical("node %s: the upgrade ended by an unexpected error", name, exc_info=error)
        if self.goodbye_fault is None:
            hold_signals(hold=False)
            return
        self._node.fail(
            NodeFailed(
                f"node {name}: its upgrade failed, {error!r}: its pages stay in memory, start it again"
            )
        )

    @property
    def _under_way(self) -> bool:
        return self._task is not None and not self._task.done()

    def refusal(self, message: Request) -> Fault | None:
        """Why a request has to wait: the next program would not know of it."""
        if not isinstance(message, Drain) or not self._under_way:
            return None
        name = self._node.config.name
        return Fault(message.id, "upgrade_under_way", f"node {name} is being upgraded: drain it afterwards")

    def admits(self, message: Request) -> bool:
        """Whether a request is still answered."""
        return self.goodbye_fault is None or isinstance(message, CONCLUDING)

    async def _run(self, answer: Callable[[Done | Fault], object], request: int) -> None:
        name = self._node.config.name
        try:
            await self._check()
            self._next = self._make_handover()
        except UpgradeError as error:
            logger.warning("node %s is not upgraded: %s", name, error)
            answer(Fault(request, "upgrade_failed", f"node {name} is not upgraded: {error}"))
            return
        logger.info("node %s: upgrading", name)
        answer(Done(request))
        hold_signals(hold=True)
        silent = await self._silent()
        await self._node.stop_moving()
        since_s = time.monotonic()
        await self._quiesce(silent)
        self._next = replace(self._next, since_s=since_s)
        self.hands_over = True
        self._node.stop()

    async def _check(self) -> None:
        """Whether the installed version would start this node. Raises UpgradeError."""
        try:
            child = await asyncio.create_subprocess_exec(
                *command(), CHECK, stdin=asyncio.subprocess.DEVNULL, stdout=PIPE, stderr=PIPE
            )
        except OSError as error:
            raise UpgradeError(f"{command()[0]} cannot be run: {error.strerror}") from error
        try:
            async with asyncio.timeout(LOAD_S):
                found, errors = await child.communicate()
        except TimeoutError:
            raise UpgradeError(f"the new version made no start within {LOAD_S:.0f} s") from None
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        if child.returncode:
            lines = errors.decode(errors="replace").strip().splitlines()
            why = lines[-1] if lines else f"exit status {child.returncode}"
            raise UpgradeError(f"the new version would not start: {why}")
        try:
            start = msgspec.json.decode(found, type=Start)
        except msgspec.MsgspecError as error:
            raise UpgradeError(f"its command starts no node of this kind: {error}") from error
        if start != start_of(self._node.config):
            raise UpgradeError(
                f"its command starts node {start.name} in {start.arena_dir} by now: put the configuration "
                "right"
            )

    def on_serving(self, inherited: Handover) -> None:
        """The node serves after an upgrade."""
        logger.info(
            "node %s: it was upgraded; nobody answered for %.0f ms",
            self._node.config.name,
            gap_ms(inherited.since_s),
        )

    def close(self) -> None:
        """The node ends: an upgrade that has not come so far is given up."""
        if self._task is not None:
            self._task.cancel()

    def hand_over(self) -> Handover:
        """What this process's next program gets."""
        assert self._next is not None
        return self._next

    def _make_handover(self) -> Handover:
        """Raises UpgradeError."""
        try:
            return self._node.make_handover()
        except OSError as error:
            raise UpgradeError(f"what the new version needs cannot be kept: {error.strerror}") from error

    async def _silent(self) -> dict[int, int]:
        """The clients with unfinished operations that send nothing more, and how many requests each made."""
        connections = self._node.all_connections.by_number
        silent = {number: each.requests for number, each in connections.items() if self._unfinished(number)}
        deadline_s = time.monotonic() + QUIESCE_S
        while silent and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)
            for number, requests in list(silent.items()):
                connection = connections.get(number)
                if connection is None or connection.requests != requests or not self._unfinished(number):
                    del silent[number]
        return silent

    async def _quiesce(self, silent: Mapping[int, int]) -> None:
        self.goodbye_fault = Fault(0, "upgrading", f"node {self._node.config.name} is being upgraded")
        deadline_s = time.monotonic() + QUIESCE_S
        while time.monotonic() < deadline_s:
            waiting = False
            for number, connection in list(self._node.all_connections.by_number.items()):
                if silent.get(number) != connection.requests and self._unfinished(number):
                    waiting = True
                else:
                    connection.refuse(self.goodbye_fault)
            if not waiting:
                return
            await asyncio.sleep(POLL_S)

    def _unfinished(self, number: int) -> bool:
        session = self._node.state.sessions.get(number)
        return session is not None and bool(session.reservations or session.transfers or session.pins)
