"""One child as its parent has it (see `parent`)."""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import socket
from collections.abc import Callable
from multiprocessing.context import SpawnProcess
from typing import NamedTuple

from pdserve.errors import StartupError
from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.changes import Changes
from pdserve.router.fleet.health_check import FirstRound
from pdserve.router.metrics.snapshot import Snapshot
from pdserve.router.processes.channel import COLLECT_TIMEOUT_S, FROM_CHILD, Channel, ChannelClosed
from pdserve.router.processes.messages import FromChild
from pdserve.router.processes.serving import run_child
from pdserve.router.server.uvicorn_server import LAST_WORD_S

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 60.0
STOP_SLACK_S = LAST_WORD_S + 3.0
"""On top of `stop_grace_s`, until a child is killed."""
_spawn = multiprocessing.get_context("spawn")
_numbers = itertools.count()


class Setup(NamedTuple):
    """What children are made of."""

    config: RouterConfig
    changes: Changes


class Child:
    """One process and the parent's end of its channel."""

    def __init__(
        self,
        setup: Setup,
        listening: socket.socket,
        admin: socket.socket | None,
        on_message: Callable[[Child, FromChild], None],
        first: FirstRound,
    ) -> None:
        """Raises StartupError."""
        self.number = next(_numbers)
        self.setup = setup
        self.is_ready = asyncio.Event()
        self.is_stopping = False
        self.metrics = Snapshot()
        """As it has sent them last."""
        self.has_left = False
        """It has sent its `Last`: these metrics are final."""
        self.channel = Channel[FromChild](FROM_CHILD, lambda message: on_message(self, message))
        self.process, ours = _started(setup.config, listening, admin, first)
        self.serving = asyncio.create_task(self.channel.run(ours))
        self.ended = asyncio.create_task(self._until_ended())
        """Its exit status."""

    async def ready(self) -> None:
        """Wait until it serves. Raises StartupError when it ends, or takes too long."""
        waiting = asyncio.create_task(self.is_ready.wait())
        try:
            await asyncio.wait(
                {waiting, self.serving}, timeout=READY_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            waiting.cancel()
        if not self.is_ready.is_set():
            raise StartupError("a router process did not start; its last words are above")

    async def ask_metrics(self) -> bool:
        """Renew `metrics`, if it serves. False if it does not answer in time: `metrics` stays as it was."""
        if self.is_ready.is_set() and not self.has_left:
            try:
                self.metrics = await self.channel.collect(COLLECT_TIMEOUT_S)
            except ChannelClosed:
                return self.has_left
        return True

    async def stop(self) -> None:
        """Let it finish what it has; kill it when that takes longer than `stop_grace_s`."""
        if not self.is_stopping and not self.ended.done():
            self.process.terminate()
        self.is_stopping = True
        await asyncio.wait({self.ended}, timeout=self.setup.config.stop_grace_s + STOP_SLACK_S)
        if not self.ended.done():
            logger.warning("router process %s does not end, it is killed", self.process.pid)
            await self.kill()

    async def kill(self) -> None:
        """End it at once."""
        if not self.ended.done():
            self.process.kill()
        await asyncio.wait({self.ended})

    async def _until_ended(self) -> int:
        await asyncio.wait({self.serving})  # its end of the channel closes when it ends
        await asyncio.to_thread(self.process.join)
        return self.process.exitcode or 0


def _started(
    config: RouterConfig, listening: socket.socket, admin: socket.socket | None, first: FirstRound
) -> tuple[SpawnProcess, socket.socket]:
    """The process and our end of its channel. Raises StartupError."""
    try:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = _spawn.Process(
                    target=run_child, args=(config, listening, theirs, admin, first), daemon=False
                )
                process.start()
            except OSError:
                ours.close()
                raise
    except OSError as error:
        raise StartupError(f"no router process can be started: {error}") from None
    ours.setblocking(False)
    return process, ours
