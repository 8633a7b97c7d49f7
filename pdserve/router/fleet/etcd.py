"""Discovery of workers in etcd: the router's fleet follows their keys.

- etcd only names workers. Their probes decide whether they are used.
- While etcd does not answer, the fleet stays unchanged.
- When a key is deleted, or its lease ends, its worker leaves.
- After a failure etcd may have lost keys. A worker without a key leaves only after the time of a lease.
"""

from __future__ import annotations

import logging

from pdserve.discovery.etcd import EtcdMember, EtcdMembership
from pdserve.discovery.workers import WORKERS, WorkerEtcdConfig
from pdserve.errors import PoolError
from pdserve.router.fleet.found import FoundWorkers
from pdserve.router.fleet.registry import Fleet

logger = logging.getLogger(__name__)


class EtcdDiscovery:
    """Keeps the fleet's members of source `etcd` equal to the keys in etcd."""

    def __init__(self, config: WorkerEtcdConfig, fleet: Fleet, cluster_token: str) -> None:
        """Connects at the first request. Workers without the cluster token are passed over.

        Raises ConfigError for a configuration that cannot be used.
        """
        self._workers = FoundWorkers("etcd", fleet)
        self._membership = EtcdMembership(
            config, config.cluster, None, self._found, kind=WORKERS, secret=cluster_token
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
        await self._membership.close()

    def _found(self, members: list[EtcdMember]) -> None:
        self._workers.follow((member.node.partition("/")[0], member.address) for member in members)
