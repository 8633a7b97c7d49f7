"""The child's end of the channel to its parent (see `parent`)."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import assert_never

import uvicorn

from pdserve.errors import ConfigError, RequestError
from pdserve.router.app.router import Router
from pdserve.router.fleet.changes import FleetChange
from pdserve.router.metrics.stats import Snapshot
from pdserve.router.processes.agreement import REPORT_S, TenantLimits
from pdserve.router.processes.channel import (
    FROM_PARENT,
    SUM_TIMEOUT_S,
    Channel,
    ChannelClosed,
    Collect,
    Collected,
    FromParent,
    Last,
    LimitsTold,
    Ready,
    Refused,
    Reload,
    Stopping,
)

logger = logging.getLogger(__name__)

START_POLL_S = 0.01
AWAY_S = 1.0
"""Without a message of its own from the parent for so long, a process holds its share of the limits."""


class Peer:
    """Reports to the parent, and does what the parent sends."""

    def __init__(self, router: Router, server: uvicorn.Server) -> None:
        self._router = router
        self._server = server
        self._channel = Channel[FromParent](FROM_PARENT, self._on_message)
        self._refused: frozenset[str] = frozenset()
        """As the parent knows them."""
        self._limits = None
        if not router.config.redis.shares_limits:  # else each process agrees with those of all routers
            self._limits = TenantLimits(router, away_s=AWAY_S, processes=router.config.processes)

    async def run(self, sock: socket.socket) -> None:
        """Until the parent is gone; then the server stops."""
        sock.setblocking(False)
        self._router.metrics = self._metrics_of_all
        self._router.fleet.members.told = lambda act, worker, role: self._channel.send(
            FleetChange(act, worker, role)
        )
        self._router.told_reload = lambda: self._channel.send(Reload())
        tasks = asyncio.create_task(self._announce()), asyncio.create_task(self._report())
        try:
            await self._channel.run(sock)
        finally:
            for task in tasks:
                task.cancel()
            if not self._server.should_exit:
                logger.warning("the parent process is gone")
                self._server.should_exit = True

    async def leave(self) -> None:
        """Send what this process has counted, and hang up."""
        self._channel.send(Last(self._router.own_metrics()))
        await self._channel.close()

    async def _announce(self) -> None:
        while not self._server.started:  # noqa: ASYNC110 - uvicorn tells nobody
            await asyncio.sleep(START_POLL_S)
        self._channel.send(Ready())

    async def _report(self) -> None:
        while True:
            self._report_refused()
            if self._limits is not None and (data := self._limits.news()) is not None:
                self._channel.send(LimitsTold(data))
            await asyncio.sleep(REPORT_S)

    def _report_refused(self) -> None:
        refused = frozenset(worker.id for worker in self._router.fleet.workers if worker.refused)
        if refused != self._refused:
            self._refused = refused
            self._channel.send(Refused(refused))

    async def _metrics_of_all(self) -> Snapshot:
        try:
            return await self._channel.collect(SUM_TIMEOUT_S)
        except ChannelClosed as error:  # this process's alone would look as if the counters had fallen
            raise RequestError(503, f"The router's metrics cannot be added up now: {error}.") from None

    def _on_message(self, message: FromParent) -> None:
        match message:
            case Collect():
                self._report_refused()  # before the metrics that show it
                self._channel.send(Collected(message.number, self._router.own_metrics()))
            case FleetChange():
                message.follow(self._router.fleet)
            case LimitsTold():
                if self._limits is not None:
                    self._limits.hear(message.data)
            case Reload():
                try:
                    self._router.reload()
                except ConfigError as error:
                    logger.error("the API keys are not changed: %s", error)  # noqa: TRY400 - one line
            case Stopping():
                self._router.is_stopping = True
            case _:
                assert_never(message)
