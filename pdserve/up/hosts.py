"""Where the processes of a plan run when they do not all run on this host: what each asks of its host, which
host it gets, and what has to be known of the others there. Pure.

A launcher with several hosts says on which of them each process runs (`Launcher.assign`). The plan then wires
names of hosts instead of loopback addresses. Nothing serves other hosts without a token, so the plan gives
the pool's nodes and their clients tokens, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pdserve.errors import StartupError
from pdserve.up.config import WORKER_ROLES, Role, Table

ALL_INTERFACES: Final = "0.0.0.0"
ALL_IPV6: Final = "::"


@dataclass(frozen=True)
class Demand:
    """A process that needs a host."""

    name: str
    role: Role
    hosts: tuple[str, ...] = ()
    """That it may run on, by name; empty: any."""
    gpus: int = 0
    gpu_numbers: tuple[int, ...] = ()
    beside: str = ""
    """A process on whose host it runs; empty: any."""


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


def share_token(token: str, workers: Sequence[Table], doors: Sequence[Table]) -> None:
    """Give the token to all of a cluster, or to none where the file gives one to any. For a worker "" is one
    too: no token; in the routers' `access` it is what launch/router.toml has for its default.
    """
    keys = ("cluster_token", "cluster_token_file")
    if any(key in worker for worker in workers for key in keys):
        return
    if not doors or not any(map(doors[0].get, keys)):
        for table in (*workers, *doors):
            table["cluster_token"] = token


def _give(table: Table, key: str, secret: str) -> None:
    """A secret where the file has none, neither as text nor in a file."""
    if not table.get(key) and not table.get(f"{key}_file"):
        table[key] = secret


def _table(config: Table, key: str) -> dict[str, Any]:
    found: dict[str, Any] = config.setdefault(key, {})
    return found


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def without_node(roles: Mapping[str, Role], hosts: Mapping[str, str]) -> list[str]:
    """For each host with workers and no pool node of its own, the first of its workers. `roles`, `hosts`: by
    process.
    """
    served = {hosts[name] for name, role in roles.items() if role == "pool"}
    first: dict[str, str] = {}
    for name, role in roles.items():
        if role in WORKER_ROLES and hosts[name] not in served:
            first.setdefault(hosts[name], name)
    return list(first.values())


def spread(
    demands: Sequence[Demand], hosts: Sequence[str], own: str, before: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Host by process. `own`: the supervisor's host; `before`: of processes that run already, and stay there.

    Raises StartupError: no host is allowed, or a GPU is named twice on each of them.
    """
    load = dict.fromkeys(hosts, 0.0)
    pools = dict.fromkeys(hosts, 0.0)
    routers = {host: 0.0 if host == own else 0.5 for host in hosts}  # the first one goes to its own
    taken: dict[str, set[int]] = {host: set() for host in hosts}
    chosen: dict[str, str] = {}
    kept = before or {}
    # sorted keeps the order of equals
    for one in sorted(demands, key=lambda one: (one.name not in kept, bool(one.beside))):
        counted = {"pool": pools, "router": routers}.get(one.role, load)
        host = kept.get(one.name) or chosen.get(one.beside) or _best(one, hosts, taken, counted)
        counted[host] += max(1, one.gpus)
        taken[host] |= set(one.gpu_numbers)
        chosen[one.name] = host
    return chosen


def _best(
    one: Demand, hosts: Sequence[str], taken: Mapping[str, set[int]], counted: Mapping[str, float]
) -> str:
    """The host for it. `taken`: GPUs that tables name; `counted`: what each host has of its kind. Raises
    StartupError.
    """
    allowed = [host for host in hosts if not one.hosts or host in one.hosts]
    if not allowed:
        raise StartupError(f"{one.name}: no host fits; the hosts are {', '.join(hosts)}")
    named = set(one.gpu_numbers)
    if clash := named.intersection(*(taken[host] for host in allowed)):
        raise StartupError(
            f"{one.name}: GPU {min(clash)} is given to another worker on each of {', '.join(allowed)}: "
            "name others, or give more hosts"
        )
    fitting = [host for host in allowed if not taken[host] & named] or allowed
    return min(fitting, key=lambda host: (counted[host], hosts.index(host)))
