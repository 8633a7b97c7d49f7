"""Discovery of workers in etcd: the router's fleet follows their keys.

- etcd only names workers. Their probes decide whether they are used.
- While etcd does not answer, the fleet stays unchanged.
- When a key is deleted, or its lease ends, its worker leaves.
- After a failure etcd may have lost keys. A worker without a key leaves only after the time of a lease.
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
    """Keeps the fleet's members of source `etcd` equal to the keys in etcd."""

    def __init__(self, config: WorkerEtcdConfig, fleet: Fleet, cluster_token: str) -> None:
        """Connects at the first request. Workers without the cluster token are passed over.

        Raises ConfigError for a configuration that cannot be used.
        """
        self._fleet = fleet
        self._patience_s = config.lease_s + 2 * config.retry_s
        self._urls: dict[str, tuple[str, Role]] = {}
        """By key: base URL and role, as etcd last named them."""
        self._missing: dict[str, asyncio.TimerHandle] = {}
        self._said: set[str] = set()
        self._membership = EtcdMembership(
            config,
            config.cluster,
            None,
            self._found,
            self._gone,
            kind=WORKERS,
            missing=self._lose,
            secret=cluster_token,
        )

    async def first(self) -> None:
        """Read all keys once. If etcd does not answer, log a warning."""
        try:
            self._found(await self._membership.nodes())
        except PoolError as error:
            logger.warning("etcd does not tell of workers yet: %s", error)

    async def run(self) -> None:
        """Follow the keys until cancelled. Can be called again after a failure."""
        await self._membership.run()

    async def close(self) -> None:
        """Close the connections to etcd; after `run` was cancelled."""
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
        """Base URL → role, without workers that the fleet would refuse. One bad key must not block others."""
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
