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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from pdserve.discovery.config import WORKERS
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
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import ROLES, Role, Source

if TYPE_CHECKING:
    from pdserve.discovery.etcd import EtcdMember, EtcdMembership

logger = logging.getLogger(__name__)


class FoundWorkers:
    """The workers of one source. The fleet's members of this source are kept equal to them."""

    def __init__(self, source: Source, fleet: Fleet) -> None:
        self._source = source
        self._fleet = fleet
        self._said: set[str] = set()

    def follow(self, named: Iterable[tuple[str, str]]) -> None:
        """Make the fleet's members of this source those that it names now, by role and base URL."""
        joined, left, problems = self._fleet.members.sync(self._source, {url: role for role, url in named})
        for worker in joined:
            logger.info("%s worker %s: %s knows of it", worker.role, worker.id, self._source)
        for worker in left:
            logger.info(
                "%s worker %s has left: %s no longer knows of it", worker.role, worker.id, self._source
            )
        for problem in set(problems) - self._said:
            logger.warning("%s: %s", self._source, problem)
        self._said = set(problems)


def dns_names(config: RouterConfig) -> dict[DnsName, Role]:
    """The DNS names in the configuration's lists of workers, each with the role of its list."""
    return {
        parse_dns_name(url, "http"): role
        for role in ROLES
        for url in getattr(config, role)
        if is_dns_name(url)
    }


Follow = Callable[[], Awaitable[None]]
"""Follows a source until cancelled. It can be called again after a failure."""


@asynccontextmanager
async def discovered(
    config: RouterConfig, fleet: Fleet, cluster_token: str, resolve: Resolve = resolve_by_system
) -> AsyncIterator[Follow | None]:
    """Has asked once who names workers besides the configuration; if that does not answer, a warning is
    logged. Yields what follows it from then on, to be cancelled before the end; None: nobody names workers.

    Workers in etcd without the cluster token are passed over. Raises ConfigError.
    """
    if names := dns_names(config):
        watch = DnsWatch(names, partial(_found_by_dns, names, FoundWorkers("dns", fleet)), resolve)
        try:
            await watch.look()
            yield watch.run
        finally:
            watch.close()
    elif config.etcd.endpoints:
        from pdserve.discovery.etcd import EtcdMembership  # a client of HTTP, which others do without

        etcd, found = config.etcd, partial(_found_in_etcd, FoundWorkers("etcd", fleet))
        membership = EtcdMembership(etcd, etcd.cluster, None, found, kind=WORKERS, secret=cluster_token)
        try:
            await _first(membership, found)
            yield membership.run
        finally:
            await membership.close()
    else:
        yield None


async def _first(membership: EtcdMembership, found: Callable[[list[EtcdMember]], None]) -> None:
    try:
        found(await membership.nodes())
    except PoolError as error:
        logger.warning("etcd does not tell of workers yet: %s", error)


def _found_by_dns(
    roles: Mapping[DnsName, Role], workers: FoundWorkers, found: Mapping[DnsName, Sequence[str]]
) -> None:
    workers.follow(
        (roles[name], f"http://{host_port(address, name.port)}")
        for name, addresses in found.items()
        for address in addresses
    )


def _found_in_etcd(workers: FoundWorkers, members: list[EtcdMember]) -> None:
    workers.follow((member.node.partition("/")[0], member.address) for member in members)
