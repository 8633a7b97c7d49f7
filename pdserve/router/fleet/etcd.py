"""Workers that etcd knows of: the router's fleet follows their keys.

What etcd says only helps to find workers: whether one is used is for its probes to decide. While etcd is away
the fleet stays as it is. A key that is deleted, or whose lease has ended, makes its worker leave; one that is
missing when etcd is back after a failure has a lease's time to be written anew, since etcd may have lost it.
"""

from __future__ import annotations

import asyncio
import logging

from pdserve.discovery.etcd import EtcdMember, EtcdMembership
from pdserve.discovery.workers import WORKERS, WorkerEtcdConfig
from pdserve.errors import PoolError
from pdserve.router.fleet.membership import FleetError
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import ROLES, Role, Worker

logger = logging.getLogger(__name__)


class Discovery:
    """Keeps the fleet's source `etcd`."""

    def __init__(self, config: WorkerEtcdConfig, fleet: Fleet) -> None:
        """Raises ConfigError."""
        self._fleet = fleet
        self._patience_s = config.lease_s + 2 * config.retry_s
        self._urls: dict[str, tuple[str, Role]] = {}
        """By key: what etcd says, or said last."""
        self._missing: dict[str, asyncio.TimerHandle] = {}
        self._said: set[str] = set()
        self._membership = EtcdMembership(
            config, config.cluster, None, self._found, self._gone, kind=WORKERS, missing=self._lose
        )

    async def first(self) -> None:
        """What etcd says now; a word in the log when it cannot be asked."""
        try:
            self._found(await self._membership.nodes())
        except PoolError as error:
            logger.warning("etcd does not tell of workers yet: %s", error)

    async def run(self) -> None:
        """Follow it, until cancelled."""
        try:
            await self._membership.run()
        finally:
            for timer in self._missing.values():
                timer.cancel()
            await self._membership.close()

    def _found(self, nodes: list[EtcdMember]) -> None:
        for node in nodes:
            role = node.node.partition("/")[0]
            if timer := self._missing.pop(node.node, None):
                timer.cancel()
            if role in ROLES:
                self._urls[node.node] = (node.address, role)
            else:
                self._say(f"{node.node} is no worker")
        self._sync()

    def _gone(self, key: str) -> None:
        self._missing.pop(key, None)
        self._urls.pop(key, None)
        self._sync()

    def _lose(self, key: str) -> None:
        loop = asyncio.get_running_loop()
        self._missing[key] = loop.call_later(self._patience_s, self._gone, key)

    def _sync(self) -> None:
        joined, left = self._fleet.members.sync("etcd", self._usable())
        for worker in joined:
            logger.info("%s worker %s: etcd knows of it", worker.role, worker.id)
        for worker in left:
            logger.info("%s worker %s has left: etcd no longer knows of it", worker.role, worker.id)

    def _usable(self) -> dict[str, Role]:
        """Without those that the fleet would refuse: one key of nonsense must not keep the others out."""
        usable: dict[str, Role] = {}
        for url, role in self._urls.values():
            try:
                worker = Worker(role, url)
                self._fleet.members.check("etcd", worker)
                usable[url] = role
            except (ValueError, FleetError) as error:
                self._say(str(error))
        return usable

    def _say(self, problem: str) -> None:
        if problem not in self._said:
            self._said.add(problem)
            logger.warning("etcd: %s", problem)
