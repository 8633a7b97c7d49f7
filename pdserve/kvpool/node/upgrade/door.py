"""The door keeper: a child process of the new version, while a node is upgraded (handover.py).

It loads what the node will load and checks that the node would start. It then waits for the frame that says
"upgrading", and from then on sends this frame to every client that connects, until its parent ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from typing import IO, Final, cast

import msgspec

from pdserve.errors import PdserveError
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.kvpool.node.memory.arena import why_not_reusable
from pdserve.kvpool.node.upgrade.handover import Handover, command
from pdserve.kvpool.protocol.slot_table import TableLayout

ENVIRONMENT: Final = "PDSERVE_POOL_DOOR"
WORD_BYTES: Final = 8192  # the longest message between the two
LAST_S: Final = 0.5  # for the last clients to take their answer


class UpgradeError(PdserveError):
    """The new version would not start; the node continues as it is."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Which node a configuration starts."""

    name: str
    arena_dir: str


class Door(msgspec.Struct, frozen=True, kw_only=True):
    """What a door keeper gets: descriptors of the listening sockets, and of the socket to its parent."""

    parent: int
    listening: list[int]
    parent_fd: int

    def keep(self, start: Start) -> None:
        """Tell the parent what would start, and be the door keeper until the parent ends it, or has ended."""
        with socket.socket(fileno=self.parent_fd) as parent, contextlib.suppress(BrokenPipeError):
            parent.send(msgspec.json.encode(start))
            frame = parent.recv(WORD_BYTES)
            if frame:
                asyncio.run(self._answer(parent, frame))

    async def _answer(self, parent: socket.socket, frame: bytes) -> None:
        loop = asyncio.get_running_loop()
        clients = _Clients()
        servers = [
            await loop.create_server(lambda: _Refusing(frame, clients), sock=socket.socket(fileno=fd))
            for fd in self.listening
        ]
        parent.setblocking(False)
        with contextlib.suppress(OSError):
            await loop.sock_recv(parent, 1)
        for server in servers:
            server.close()
        await asyncio.sleep(0)  # accepted sockets become connections
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                while clients.count:
                    clients.changed.clear()
                    await clients.changed.wait()


class _Clients:
    """How many connections are open."""

    def __init__(self) -> None:
        self.count = 0
        self.changed = asyncio.Event()

    def add(self, count: int) -> None:
        self.count += count
        self.changed.set()


class _Refusing(asyncio.Protocol):
    """A connection that gets one frame, and is closed when its client has said hello."""

    def __init__(self, frame: bytes, clients: _Clients) -> None:
        self._frame = frame
        self._clients = clients

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._clients.add(1)
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._frame)

    def data_received(self, data: bytes) -> None:
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._clients.add(-1)


def received_door() -> Door | None:
    """What this process got, if it was started as a door keeper. Can be asked once."""
    text = os.environ.pop(ENVIRONMENT, "")
    try:
        door = msgspec.json.decode(text, type=Door) if text else None
    except msgspec.MsgspecError:
        return None
    return door if door is not None and door.parent == os.getppid() else None


def start_door(handover: Handover, parent_fd: int, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start this process's command, from the installed version, as a door keeper. Its log goes to `errors`.
    Raises OSError.
    """
    listening = [fd for fds in handover.listening.values() for fd in fds]
    door = Door(parent=os.getpid(), listening=listening, parent_fd=parent_fd)
    return subprocess.Popen(
        command(),
        stdin=subprocess.DEVNULL,
        stderr=errors,
        env={**os.environ, ENVIRONMENT: msgspec.json.encode(door).decode()},
        pass_fds=[*listening, parent_fd],
    )


def check_start(config: PoolNodeConfig) -> Start:
    """Whether the node would start, once its configuration is parsed and its modules are loaded. Raises
    UpgradeError, StartupError.
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


def check_same(found: Start, ours: Start) -> None:
    """Raises UpgradeError: the command starts another node."""
    if found != ours:
        raise UpgradeError(
            f"its command starts node {found.name} in {found.arena_dir} by now: put the configuration right"
        )
