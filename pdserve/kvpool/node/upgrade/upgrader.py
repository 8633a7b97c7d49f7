"""Replacing a running node by its new version (`pdserve pool upgrade`), without a failed operation.

    1. load        a stand-in, a child process, runs the node's own command: does the configuration parse, do
                   all modules load, will the pages be taken over? If not, the node goes on and says why.
    2. wait        for those who have something unfinished (reservations, transfers, pins) to be heard of once
                   more, QUIESCE_S at most, while everybody is served: a client that was stopped, or hangs,
                   must not hold up the others.
    3. quiesce     each client is told "upgrading" as soon as nothing of its is unfinished: it connects anew
                   and waits. What is unfinished has QUIESCE_S to end, that of the silent none; what has not
                   ended is treated as after a crash (quarantined, or a miss for its reader).
    4. hand over   handover.py: to the stand-in, and from it to this process, which has executed the new
                   version meanwhile: 2 and 3 again, on the stand-in's side. Those who come while nobody
                   serves are told "upgrading" too.

After 1 nothing can be taken back: should the exec itself fail, the process ends with its pages in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import time
from collections.abc import Mapping
from tempfile import TemporaryFile
from typing import IO, Final, Protocol

import msgspec
from msgspec.structs import replace

from pdserve.errors import NodeFailed, PdserveError
from pdserve.kvpool.core.state import NodeState
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.kvpool.node.memory.arena import why_not_reusable
from pdserve.kvpool.node.peers.rebalancer import Mover
from pdserve.kvpool.node.serving.connection import ClientConnection, Visitors
from pdserve.kvpool.node.serving.listeners import Listeners
from pdserve.kvpool.node.upgrade.handover import (
    GO,
    READY,
    SERVING,
    TURN_S,
    Baton,
    Handover,
    Succession,
    command,
    gap_ms,
    hold_signals,
    start_stand_in,
)
from pdserve.kvpool.protocol.cluster_messages import Drain, Upgrade
from pdserve.kvpool.protocol.messages import Abort, Commit, Done, Fault, Release, Request
from pdserve.kvpool.protocol.slot_table import TableLayout

logger = logging.getLogger(__name__)

LOAD_S: Final = 60.0  # for a stand-in to load
ENDING_S: Final = 1.0
QUIESCE_S: Final = 2.0
POLL_S: Final = 0.002
DOOR_S: Final = 0.2  # who comes to the door is told after so long at most: it will come back at once
CONCLUDING: Final = (Commit, Abort, Release)  # they end what is unfinished


class UpgradeError(PdserveError):
    """The new version would not start; the node goes on."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What a stand-in found: which node would start."""

    name: str
    arena_dir: str


class Host(Protocol):
    """What an upgrade asks of its node."""

    config: PoolNodeConfig
    visitors: Visitors
    state: NodeState
    mover: Mover
    listeners: Listeners

    def passed_on(self) -> Handover:
        """Copies of all that the next program needs. Raises OSError; then there are none."""
        ...

    def fail(self, error: PdserveError) -> None:
        """End the event loop with an error; the pages stay."""
        ...

    def stop(self) -> None:
        """End the event loop."""
        ...


class Upgrader:
    """One upgrade at a time; lives in the node's loop."""

    def __init__(self, node: Host, succession: Succession | None) -> None:
        self._node = node
        self._succession = succession
        self.stands_in = succession is not None and succession.stands_in
        self._baton = succession.baton if succession is not None else None
        self._next: Handover | None = None  # for this process's next program
        self._child: subprocess.Popen[bytes] | None = None
        self._task: asyncio.Task[None] | None = None
        self.at_door = False  # all that is left to do is to tell people to wait
        self.farewell: Fault | None = None  # what clients are told from now on; None: nothing, we serve
        self.since_s: float | None = None  # once set, the node ends for another program to take over

    def begin(self, connection: ClientConnection, request: Upgrade) -> None:
        """Somebody who may asks for it."""
        if self._under_way:
            connection.send(Fault(request.id, "upgrade_failed", "an upgrade is under way already"))
            return
        self._task = asyncio.get_running_loop().create_task(self._run(connection, request))

    @property
    def _under_way(self) -> bool:
        return self.stands_in or (self._task is not None and not self._task.done())

    def refusal(self, message: Request) -> Fault | None:
        """Why a request has to wait: the next program would not know of it."""
        if not isinstance(message, Drain) or not self._under_way:
            return None
        name = self._node.config.name
        return Fault(message.id, "upgrade_under_way", f"node {name} is being upgraded: drain it afterwards")

    def admits(self, message: Request) -> bool:
        """Whether a request is still answered."""
        return self.farewell is None or isinstance(message, CONCLUDING)

    async def _run(self, connection: ClientConnection, request: Upgrade) -> None:
        name = self._node.config.name
        try:
            await self._load_stand_in()
        except UpgradeError as error:
            logger.warning("node %s is not upgraded: %s", name, error)
            connection.send(Fault(request.id, "upgrade_failed", f"node {name} is not upgraded: {error}"))
            return
        logger.info("node %s: upgrading", name)
        connection.send(Done(request.id))
        await self._leave()

    async def _load_stand_in(self) -> None:
        """Raises UpgradeError; then there is none."""
        try:
            with contextlib.ExitStack() as undo:
                mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                baton = Baton(mine)
                undo.callback(baton.close)
                with theirs, TemporaryFile() as errors:
                    passed = self._node.passed_on()
                    undo.callback(passed.close)
                    undo.callback(self._end_child)
                    self._child = start_stand_in(replace(passed, baton_fd=theirs.fileno()), errors)
                    theirs.close()  # so that its end is heard
                    word, _, found = (await baton.heard(LOAD_S)).partition(" ")
                    if word != READY:
                        raise UpgradeError(self._why_not_loaded(errors))
                _check_same(msgspec.json.decode(found, type=Start), start_of(self._node.config))
                undo.pop_all()
        except OSError as error:
            raise UpgradeError(f"{command()[0]} cannot be run: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            raise UpgradeError(f"its command starts no node of this kind: {error}") from error
        self._baton = baton
        self._next = replace(passed, baton_fd=baton.fileno(), stand_in=self._child.pid)

    def _why_not_loaded(self, errors: IO[bytes]) -> str:
        assert self._child is not None
        try:
            status = self._child.wait(ENDING_S)  # it has ended, or said nothing for long
        except subprocess.TimeoutExpired:
            return f"the new version made no start within {LOAD_S:.0f} s"
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines() or [f"exit status {status}"]
        return f"the new version would not start: {lines[-1]}"

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    async def _leave(self) -> None:
        if not self.stands_in:
            hold_signals(hold=True)
        silent = await self._silent()
        await self._node.mover.close()
        since_s = time.monotonic()
        await self._quiesce(silent)
        self.since_s = since_s
        self._node.stop()

    def took_over(self) -> None:
        """The node serves, whoever did before."""
        succession, name = self._succession, self._node.config.name
        if succession is None:
            return
        who = "its stand-in serves" if self.stands_in else "it was upgraded"
        logger.info("node %s: %s; nobody answered for %.0f ms", name, who, gap_ms(succession.since_s))
        if self._baton is not None:
            self._baton.say(SERVING)
        if self.stands_in:
            self._task = asyncio.get_running_loop().create_task(self._stand_in())
        else:
            self._baton = None
            succession.end()

    async def _stand_in(self) -> None:
        assert self._baton is not None
        if (await self._baton.heard()).startswith(READY):
            await self._leave()
        else:
            name = self._node.config.name
            self._node.fail(NodeFailed(f"node {name} was lost while it was upgraded: start it again"))

    async def pass_on(self) -> Handover | None:
        """The memory is let go: stay at the door until the other serves. What this process's next program is
        passed; None in a stand-in, whose end this is.
        """
        assert self._baton is not None
        assert self.farewell is not None
        node = self._node
        if self.stands_in:
            node.listeners.withdraw()
        self._baton.say(f"{GO} {self.since_s}")
        self.at_door = True
        hearing = asyncio.ensure_future(self._baton.heard(TURN_S))
        while not hearing.done():
            await asyncio.wait({hearing}, timeout=DOOR_S)
            node.visitors.refuse(self.farewell)
        node.listeners.close()
        await node.visitors.dismiss(self.farewell)
        if self._next is not None and hearing.result() != SERVING:
            self._end_child()
            self._baton.close()
            return replace(self._next, baton_fd=-1, stand_in=0)
        return self._next

    async def _silent(self) -> dict[int, int]:
        """Who has something unfinished and says nothing more, and how many requests they have made."""
        connections = self._node.visitors.all
        silent = {number: each.requests for number, each in connections.items() if self._unfinished(number)}
        deadline = time.monotonic() + QUIESCE_S
        while silent and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
            for number, requests in list(silent.items()):
                connection = connections.get(number)
                if connection is None or connection.requests != requests or not self._unfinished(number):
                    del silent[number]
        return silent

    async def _quiesce(self, silent: Mapping[int, int]) -> None:
        self.farewell = Fault(0, "upgrading", f"node {self._node.config.name} is being upgraded")
        deadline = time.monotonic() + QUIESCE_S
        while time.monotonic() < deadline:
            waiting = False
            for number, connection in list(self._node.visitors.all.items()):
                if silent.get(number) != connection.requests and self._unfinished(number):
                    waiting = True
                else:
                    connection.refuse(self.farewell)
            if not waiting:
                return
            await asyncio.sleep(POLL_S)

    def _unfinished(self, number: int) -> bool:
        session = self._node.state.sessions.get(number)
        return session is not None and bool(session.reservations or session.transfers or session.pins)


def _check_same(found: Start, ours: Start) -> None:
    if found != ours:
        raise UpgradeError(
            f"its command starts node {found.name} in {found.arena_dir} by now: put the configuration right"
        )


def check_start(config: PoolNodeConfig) -> Start:
    """What a stand-in does first, its configuration parsed and its modules loaded. Raises UpgradeError,
    StartupError.
    """
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
