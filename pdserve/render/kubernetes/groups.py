"""Which processes of a cluster file are alike. Kubernetes runs each such group as one workload. Pure.

The processes get the names of their pods, and hosts by the names of their pods in the group's service. Then
`up.plan` wires their addresses as for any other place with several hosts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from pdserve.errors import ConfigError
from pdserve.resources.gpus import gpu_count, node_count
from pdserve.up.config import WORKER_ROLES, ClusterFile, Role, Table, merge
from pdserve.up.plan import Plan, ProcessSpec, make_plan
from pdserve.up.site import Site

NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")
WORKER_PORT: Final = 30000
CONTROL_PORT: Final = 7700
PAGES_PORT: Final = 7701
METRICS_PORT: Final = 9100
ADMIN_PORT: Final = 9000
BOOTSTRAP_PORT: Final = 8998
CONFIG_DIR: Final = "/etc/pdserve/config"
SHM_DIR: Final = "/dev/shm"
HUGE_DIR: Final = "/hugepages"
GROUPED: Final[tuple[Role, ...]] = ("pool", *WORKER_ROLES)
TIERS_DIR: Final = "/var/lib/pdserve"


@dataclass(frozen=True)
class Group:
    """Processes that are alike but for their name. The router is a group of one."""

    name: str
    """Of the workload, its service and its container's file: `disagg-decode`."""
    role: Role
    specs: tuple[ProcessSpec, ...]
    gpus: int = 0
    """GPUs of each pod, where it runs on GPUs."""
    nodes: int = 1
    """Pods of each process: hosts that its ranks are divided between."""

    @property
    def first(self) -> ProcessSpec:
        """What is true of all, but for the name."""
        return self.specs[0]


@dataclass(frozen=True)
class Cluster:
    """What is rendered."""

    name: str
    plan: Plan
    groups: tuple[Group, ...]

    def of(self, *roles: Role) -> list[Group]:
        """The groups of these roles."""
        return [group for group in self.groups if group.role in roles]

    @property
    def workers(self) -> list[Group]:
        """The groups of workers."""
        return self.of(*WORKER_ROLES)


def make_cluster(file: ClusterFile, extra_args: list[str]) -> Cluster:
    """Group and wire the processes. `extra_args`: for SGLang in every worker. Raises ConfigError."""
    name = file.cluster.name
    if not NAME.fullmatch(name):
        raise ConfigError(f"cluster.name must be a name for Kubernetes (a-z, 0-9, -), found {name!r}")
    if file.command:
        raise ConfigError("commands are not written for Kubernetes")
    named: dict[str, tuple[Role, list[Table]]] = {}
    for role in GROUPED:
        tables = file.pool if role == "pool" else [merge(file.worker, table) for table in getattr(file, role)]
        for group, alike in _alike(name, role, tables, taken=named):
            named[group] = (role, alike)
    nodes = {
        group: node_count(_words(tables[0], extra_args)) if role != "pool" else 1
        for group, (role, tables) in named.items()
    }
    gpus = {
        group: _gpus(group, role, tables[0], extra_args) // nodes[group]
        for group, (role, tables) in named.items()
    }
    lists: dict[str, list[Table]] = {role: [] for role in GROUPED}
    hosts: dict[str, str] = {}
    for group, (role, tables) in named.items():
        for number, table in enumerate(tables):
            pod = f"{group}-{number}"
            hosts[pod] = f"{pod}.{group}"
            lists[role].append({**_prepared(role, table), "name": pod})
    router = f"{name}-router"
    hosts[router] = router
    plan = make_plan(
        replace(file, worker={}, router={**_router(file.router, name), "name": router}, **lists),
        program=("pdserve",),
        run_dir=Path(CONFIG_DIR),
        uid=0,
        ports=count(BOOTSTRAP_PORT),
        extra_args=extra_args,
        site=Site(hosts),
    )
    for spec in plan.processes:
        if spec.needs.hosts:
            raise ConfigError(f"'{spec.table}.place.hosts' is not for Kubernetes: give place.labels")
    specs = {spec.name: spec for spec in plan.processes}
    made = [
        Group(
            group, role, tuple(specs[f"{group}-{i}"] for i in range(len(tables))), gpus[group], nodes[group]
        )
        for group, (role, tables) in named.items()
    ]
    return Cluster(name, plan, (*made, Group(router, "router", (specs[router],))))


def _alike(
    cluster: str, role: Role, tables: list[Table], taken: Mapping[str, object]
) -> Iterator[tuple[str, list[Table]]]:
    """(name, equal tables) in the order of their first. A name of the file counts without its number."""
    found: list[tuple[str, list[Table]]] = []
    for table in tables:
        own = {key: value for key, value in table.items() if key != "name"}
        stem = re.sub(r"-?\d+$", "", str(table.get("name", role)))
        alike = next((made for name, made in found if name == stem and made[0] == own), None)
        if alike is None:
            found.append((stem, [own]))
        else:
            alike.append(own)
    names = set(taken)
    for stem, alike in found:
        numbers = count(2)
        name = f"{cluster}-{stem}"
        while name in names:
            name = f"{cluster}-{stem}-{next(numbers)}"
        if not NAME.fullmatch(stem) or len(name) > 52:  # with a pod's number 63
            raise ConfigError(f"name {stem!r} is no name for Kubernetes (a-z, 0-9, -), or {name} is too long")
        names.add(name)
        yield name, alike


def _gpus(group: str, role: Role, table: Table, extra_args: list[str]) -> int:
    if role not in WORKER_ROLES:
        return 0
    words = {word.partition("=")[0] for word in _words(table, extra_args)}
    if "--nnodes" in words and not table.get("engine", {}).get("trusted_network"):
        raise ConfigError(f"{group}: --nnodes needs engine.trusted_network = true: docs/security.md says why")
    if named := words & {"--node-rank", "--dist-init-addr"}:
        raise ConfigError(f"{group}: {min(named)} is given by Kubernetes: give --nnodes alone")
    engine = table.get("engine", {})
    return gpu_count(_words(table, extra_args), engine.get("device", "auto"))


def _words(table: Table, extra_args: list[str]) -> list[str]:
    engine = table.get("engine", {})
    return [*(engine.get("extra_args", []) if isinstance(engine, dict) else []), *extra_args]


def _prepared(role: Role, table: Table) -> Table:
    """A table with what is the same in every pod: ports, and directories that are volumes."""
    if role != "pool":
        engine = table.get("engine", {})
        return {**table, "engine": {**engine, "port": WORKER_PORT}} if isinstance(engine, dict) else table
    fixed: dict[str, Any] = {
        "listen": [f"tcp:0.0.0.0:{CONTROL_PORT}"],
        "metrics": f"0.0.0.0:{METRICS_PORT}",
        "arena_dir": f"{SHM_DIR}/pdserve",
        "trusted_parents": True,
        "tcp": {**table.get("tcp", {}), "port": PAGES_PORT},
    }
    if table.get("capacity_bytes", "auto") == "auto":
        fixed["capacity_bytes"] = "2GiB"
    if table.get("huge_pages", "off") in ("2MiB", "1GiB"):
        fixed["huge_pages_dir"] = f"{HUGE_DIR}/pdserve"
    if tiers := table.get("tiers"):
        fixed["tiers"] = [{**tier, "path": f"{TIERS_DIR}/tier{i}/pages"} for i, tier in enumerate(tiers)]
    return {**table, **fixed}


def _router(table: Table, name: str) -> Table:
    """The router's table: it serves all hosts, and finds workers by their pods unless there is an etcd."""
    made = {**table, "host": "0.0.0.0", "port": table.get("port") or 8000}
    made["admin"] = {**table.get("admin", {}), "host": "127.0.0.1", "port": ADMIN_PORT}
    if not table.get("etcd", {}).get("endpoints"):
        selector = (
            f"app.kubernetes.io/name=pdserve,app.kubernetes.io/instance={name},"
            f"app.kubernetes.io/component in ({','.join(WORKER_ROLES)})"
        )
        by_name = {"address": "name"} if table.get("tls", {}).get("ca") else {}
        made["kubernetes"] = {"selector": selector, **by_name}
    return made
