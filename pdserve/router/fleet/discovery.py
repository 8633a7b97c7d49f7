"""Discovery of workers by DNS and etcd, which only name workers. Their probes decide whether they are used.

DNS: `dns+http://NAME:PORT` in the router's lists of workers.

- A worker joins when the name has its address, and leaves when two lookups in a row lack it.
- While DNS does not answer, the fleet stays unchanged.
- Names are read at the start; a reload of the configuration changes the listed workers alone.

etcd: the fleet follows the workers' keys.

- While etcd does not answer, the fleet stays unchanged.
- When a key is deleted, or its lease ends, its worker leaves.
- After a failure etcd may have lost keys. A worker without a key leaves only after the time of a lease.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pdserve.discovery.config import WORKERS, WorkerEtcdConfig
from pdserve.discovery.dns import (
    DnsName,
    DnsWatch,
    Resolve,
    host_port,
    is_dns_name,
    parse_dns_name,
    resolve_by_system,
)
from pdserve.errors import PoolError
from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.membership import FleetError
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import ROLES, Role, Source, Worker

if TYPE_CHECKING:
    from pdserve.discovery.etcd import EtcdMember

logger = logging.getLogger(__name__)


class FoundWorkers:
    """The workers of one source. The fleet's members of this source are kept equal to them."""

    def __init__(self, source: Source, fleet: Fleet) -> None:
        self._source = source
        self._fleet = fleet
        self._said: set[str] = set()

    def follow(self, named: Iterable[tuple[str, str]]) -> None:
        """Make the fleet's members of this source those that it names now, by role and base URL."""
        joined, left = self._fleet.members.sync(self._source, self._usable(named))
        for worker in joined:
            logger.info("%s worker %s: %s knows of it", worker.role, worker.id, self._source)
        for worker in left:
            logger.info(
                "%s worker %s has left: %s no longer knows of it", worker.role, worker.id, self._source
            )

    def _usable(self, named: Iterable[tuple[str, str]]) -> dict[str, Role]:
        """Base URL → role, without workers that the fleet would refuse. A bad name must not block others."""
        usable: dict[str, Role] = {}
        for role, url in named:
            if role not in ROLES:
                self._say(f"{url} is named as {role!r}, and no worker is that")
                continue
            try:
                worker = Worker(role, url)
                self._fleet.members.check(self._source, worker)
                usable[url] = role
            except (ValueError, FleetError) as error:
                self._say(str(error))
        return usable

    def _say(self, problem: str) -> None:
        if problem not in self._said:
            self._said.add(problem)
            logger.warning("%s: %s", self._source, problem)


def dns_names(config: RouterConfig) -> dict[DnsName, Role]:
    """The DNS names in the configuration's lists of workers, each with the role of its list."""
    return {
        parse_dns_name(url, "http"): role
        for role in ROLES
        for url in getattr(config, role)
        if is_dns_name(url)
    }


class DnsDiscovery:
    """Keeps the fleet's members of source `dns` equal to the addresses of some names."""

    def __init__(
        self, names: Mapping[DnsName, Role], fleet: Fleet, resolve: Resolve = resolve_by_system
    ) -> None:
        self._names = names
        self._workers = FoundWorkers("dns", fleet)
        self._watch = DnsWatch(names, self._changed, resolve)

    async def first(self) -> None:
        """Look the names up once. If DNS does not answer, log a warning."""
        await self._watch.look()

    async def run(self) -> None:
        """Follow the names until cancelled. Can be called again after a failure."""
        await self._watch.run()

    async def close(self) -> None:
        """Leave the lookups in progress; after `run` was cancelled."""
        self._watch.close()

    def _changed(self, found: Mapping[DnsName, Sequence[str]]) -> None:
        self._workers.follow(
            (self._names[name], f"http://{host_port(address, name.port)}")
            for name, addresses in found.items()
            for address in addresses
        )


class EtcdDiscovery:
    """Keeps the fleet's members of source `etcd` equal to the keys in etcd."""

    def __init__(self, config: WorkerEtcdConfig, fleet: Fleet, cluster_token: str) -> None:
        """Connects at the first request. Workers without the cluster token are passed over.

        Raises ConfigError for a configuration that cannot be used.
        """
        from pdserve.discovery.etcd import EtcdMembership  # a client of HTTP, which others do without

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
