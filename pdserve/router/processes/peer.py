"""A router process among several: what it tells its parent, and what it hears from it (see `parent`)."""

from __future__ import annotations

import asyncio
import logging
import socket

import uvicorn

from pdserve.errors import ConfigError, RequestError
from pdserve.router.app.router import Router
from pdserve.router.fleet.changes import FleetChange
from pdserve.router.metrics.snapshot import Snapshot
from pdserve.router.processes.channel import SUM_TIMEOUT_S, Channel, ChannelClosed
from pdserve.router.processes.messages import (
    Collect,
    Collected,
    Last,
    Message,
    Ready,
    Refused,
    Reload,
    Shared,
    Wants,
)
from pdserve.router.processes.shared_limits import TELL_S, SharedLimits

logger = logging.getLogger(__name__)

START_POLL_S = 0.01


class Peers:
    """The child's end of the channel."""

    def __init__(self, router: Router, server: uvicorn.Server) -> None:
        self._router = router
        self._server = server
        self._channel = Channel(self._on_message)
        self._refused: frozenset[str] = frozenset()
        """As the parent knows it."""
        entrance = router.entrance
        self._limits = SharedLimits(entrance.tenants, entrance.admission.held_back)

    async def run(self, sock: socket.socket) -> None:
        """Until the parent is gone; then the server stops."""
        sock.setblocking(False)
        self._router.metrics = self._everybodys
        self._router.fleet.told = lambda act, worker, role: self._channel.send(FleetChange(act, worker, role))
        self._router.told_reload = lambda: self._channel.send(Reload())
        tasks = asyncio.create_task(self._announce()), asyncio.create_task(self._tell())
        try:
            await self._channel.run(sock)
        finally:
            for task in tasks:
                task.cancel()
            if not self._server.should_exit:
                logger.warning("the parent process is gone")
                self._server.should_exit = True

    async def leave(self) -> None:
        """The last word: what this process has counted."""
        self._channel.send(Last(self._router.own_metrics()))
        await self._channel.close()

    async def _announce(self) -> None:
        while not self._server.started:  # noqa: ASYNC110 - uvicorn tells nobody
            await asyncio.sleep(START_POLL_S)
        self._channel.send(Ready())

    async def _tell(self) -> None:
        while True:
            self._tell_refused()
            if wants := self._limits.changed():
                self._channel.send(Wants(wants))
            await asyncio.sleep(TELL_S)

    def _tell_refused(self) -> None:
        refused = frozenset(worker.id for worker in self._router.fleet.workers if worker.refused)
        if refused != self._refused:
            self._refused = refused
            self._channel.send(Refused(refused))

    async def _everybodys(self) -> Snapshot:
        try:
            return await self._channel.collect(SUM_TIMEOUT_S)
        except ChannelClosed as error:  # this process's alone would look as if the counters had fallen
            raise RequestError(503, f"The router's metrics cannot be added up now: {error}.") from None

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Collect):
            self._tell_refused()  # before the metrics that show it
            self._channel.send(Collected(message.number, self._router.own_metrics()))
        elif isinstance(message, FleetChange):
            message.follow(self._router.fleet)
        elif isinstance(message, Shared):
            self._limits.apply(message.tenants, asyncio.get_running_loop().time())
            self._router.entrance.fill()
        elif isinstance(message, Reload):
            try:
                self._router.reload()
            except ConfigError as error:
                logger.error("the API keys are not changed: %s", error)  # noqa: TRY400 - one line
