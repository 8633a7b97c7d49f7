"""Discovery of workers by DNS: `dns+http://NAME:PORT` in the router's lists of workers.

- A worker joins when the name has its address, and leaves when two lookups in a row lack it.
- While DNS does not answer, the fleet stays unchanged.
- Names are read at the start; a reload of the configuration changes the listed workers alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdserve.discovery.dns import (
    DnsName,
    DnsWatch,
    Resolve,
    host_port,
    is_dns_name,
    parse_dns_name,
    resolve_by_system,
)
from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.found import FoundWorkers
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import ROLES, Role


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
