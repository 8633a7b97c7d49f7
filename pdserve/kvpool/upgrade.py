"""Replacing a running node by its new version (`pdserve pool upgrade`), without a failed operation.

    1. preflight   a child process runs the node's own command with `--check`: does the configuration parse,
                   do all modules load, will the pages be taken over? If not, the node goes on and says why.
    2. quiesce     each client is told "upgrading" as soon as nothing of its is unfinished: it connects anew
                   and waits. Reservations, transfers and pins have QUIESCE_S to end; what has not is treated
                   as after a crash (quarantined, or a miss for its reader).
    3. exec        handover.py. Clients that connect meanwhile wait in the listening sockets' queues.

After 1 nothing can be taken back: should the exec itself fail, the process ends with its pages in memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final, Protocol

import msgspec

from pdserve.errors import PdserveError
from pdserve.kvpool.arena import why_not_reusable
from pdserve.kvpool.cluster_messages import Upgrade
from pdserve.kvpool.config import PoolNodeConfig
from pdserve.kvpool.connection import ClientConnection
from pdserve.kvpool.handover import command
from pdserve.kvpool.leases import Session
from pdserve.kvpool.messages import Abort, Commit, Done, Fault, Release, Request
from pdserve.kvpool.mover import Mover
from pdserve.kvpool.state import NodeState
from pdserve.kvpool.table import TableLayout
from pdserve.kvpool.visitors import Visitors

logger = logging.getLogger(__name__)

PREFLIGHT_TIMEOUT_S: Final = 60.0
QUIESCE_S: Final = 2.0
POLL_S: Final = 0.002
CONCLUDING: Final = (Commit, Abort, Release)  # they end what is unfinished


class UpgradeError(PdserveError):
    """The new version would not start; the node goes on."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What `pool serve --check` found: which node would start."""

    name: str
    arena_dir: str


class Host(Protocol):
    """What an upgrade asks of its node."""

    config: PoolNodeConfig
    visitors: Visitors
    state: NodeState
    mover: Mover

    def stop(self) -> None:
        """End the event loop."""
        ...


class Upgrader:
    """One upgrade at a time; lives in the node's loop."""

    def __init__(self, node: Host) -> None:
        self._node = node
        self._task: asyncio.Task[None] | None = None
        self.farewell: Fault | None = None  # what clients are told from now on; None: nothing, we serve
        self.since_s: float | None = None  # once set, the node ends for another program to take over

    def begin(self, connection: ClientConnection, request: Upgrade) -> None:
        """Somebody who may asks for it."""
        if self._task is not None and not self._task.done():
            connection.send(Fault(request.id, "upgrade_failed", "an upgrade is under way already"))
            return
        self._task = asyncio.get_running_loop().create_task(self._run(connection, request))

    def admits(self, message: Request) -> bool:
        """Whether a request is still answered."""
        return self.farewell is None or isinstance(message, CONCLUDING)

    async def _run(self, connection: ClientConnection, request: Upgrade) -> None:
        name = self._node.config.name
        try:
            await preflight(self._node.config)
        except UpgradeError as error:
            logger.warning("node %s is not upgraded: %s", name, error)
            connection.send(Fault(request.id, "upgrade_failed", f"node {name} is not upgraded: {error}"))
            return
        logger.info("node %s: upgrading", name)
        connection.send(Done(request.id))
        await self._node.mover.close()
        since_s = time.monotonic()
        await self._quiesce()
        self.since_s = since_s
        self._node.stop()

    async def _quiesce(self) -> None:
        self.farewell = Fault(0, "upgrading", f"node {self._node.config.name} is being upgraded")
        deadline = time.monotonic() + QUIESCE_S
        while time.monotonic() < deadline:
            waiting = False
            for number, connection in list(self._node.visitors.all.items()):
                session = self._node.state.sessions.get(number)
                if session is not None and _unfinished(session):
                    waiting = True
                else:
                    connection.refuse(self.farewell)
            if not waiting:
                return
            await asyncio.sleep(POLL_S)


def _unfinished(session: Session) -> bool:
    return bool(session.reservations or session.transfers or session.pins)


async def preflight(config: PoolNodeConfig) -> None:
    """Raises UpgradeError: the command that this process runs would not start this node now."""
    words = [*command(), "--check"]
    try:
        child = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise UpgradeError(f"{words[0]} cannot be run: {error.strerror}") from None
    try:
        async with asyncio.timeout(PREFLIGHT_TIMEOUT_S):
            out, err = await child.communicate()
    except TimeoutError:
        child.kill()
        await child.wait()
        raise UpgradeError(f"the new version made no start within {PREFLIGHT_TIMEOUT_S:.0f} s") from None
    if child.returncode:
        lines = err.decode(errors="replace").strip().splitlines() or [f"exit status {child.returncode}"]
        raise UpgradeError(f"the new version would not start: {lines[-1]}")
    try:
        found = msgspec.json.decode(out, type=Start)
    except msgspec.MsgspecError:
        raise UpgradeError("the new version does not know --check") from None
    if found != start_of(config):
        raise UpgradeError(
            f"its command starts node {found.name} in {found.arena_dir} by now: put the configuration right"
        )


def check_start(config: PoolNodeConfig) -> Start:
    """What `--check` does, beyond parsing the configuration and importing the node. Raises StartupError."""
    directory = config.arena_dir / config.name
    layout = TableLayout(config.capacity, config.slab, config.min_slot)
    home = config.placement.home(directory)
    reason = why_not_reusable(directory, home, layout)
    if reason:
        raise UpgradeError(f"it cannot take over the pages in {directory}: {reason}")
    return start_of(config)


def start_of(config: PoolNodeConfig) -> Start:
    """Which node a configuration starts."""
    return Start(name=config.name, arena_dir=str(config.arena_dir.absolute()))
