"""Where the processes of a plan run when they do not all run on this host. Pure.

Each place that has several hosts says on which of them each process runs (`Place.assign`). The plan then
wires names of hosts instead of loopback addresses. Nothing serves other hosts without a token, so the plan
gives the pool's nodes and their clients tokens, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pdserve.up.config import Role, Table
from pdserve.up.needs import NOTHING, Needs

ALL_INTERFACES: Final = "0.0.0.0"
ALL_IPV6: Final = "::"


@dataclass(frozen=True)
class Demand:
    """A process that needs a host."""

    name: str
    role: Role
    needs: Needs = NOTHING


@dataclass(frozen=True)
class Site:
    """The host of each process, and secrets that all of them may need."""

    hosts: Mapping[str, str]
    """By process: the name under which other hosts reach its host."""
    node_token: str = ""
    """Of pool nodes for each other and for administrators; empty: what the file says is enough."""
    page_token: str = ""
    """Of workers, to read and write pages."""
    far: frozenset[str] = frozenset()
    """Processes that run on other hosts than the supervisor."""
    ipv6: frozenset[str] = frozenset()
    """Hosts that are reached by IPv6 only."""

    def all_interfaces(self, name: str) -> str:
        """Where this process listens for other hosts."""
        return ALL_IPV6 if self.hosts[name] in self.ipv6 else ALL_INTERFACES


def open_pool_node(config: Table, site: Site, port: int) -> str:
    """Let a pool node serve other hosts at `port`; gives its address for them. What the file says stays."""
    cluster = _table(config, "cluster")
    if site.node_token and not config.get("insecure"):
        _give(cluster, "token", site.node_token)
        _give(config, "admin_token", site.node_token)
        _give(_table(config, "namespace_defaults"), "read_token", site.page_token)
    return str(cluster.setdefault("advertise", f"tcp:{bracketed(site.hosts[config['name']])}:{port}"))


def open_worker(config: Table, site: Site, url: str) -> None:
    """Let a worker be reached from other hosts at `url`, and reach the pool."""
    config.setdefault("advertise", url)
    pool = _table(config, "pool")
    if site.page_token:
        _give(pool, "token", site.page_token)


def as_seen_from(nodes: list[Table], sockets: Mapping[str, str], site: Site, name: str) -> list[Table]:
    """The pool's nodes for this process: those on its own host by their Unix sockets, which map memory."""
    return [
        node | {"address": sockets[node["node"]]}
        if node["node"] in sockets and site.hosts[node["node"]] == site.hosts[name]
        else node
        for node in nodes
    ]


def _give(table: Table, key: str, secret: str) -> None:
    """A secret where the file has none, neither as text nor in a file."""
    if not table.get(key) and not table.get(f"{key}_file"):
        table[key] = secret


def _table(config: Table, key: str) -> dict[str, Any]:
    found: dict[str, Any] = config.setdefault(key, {})
    return found


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
