"""From a cluster file to the list of processes to run. Pure: free ports are an input, nothing is started or
written.

A plan is a sequence of stages; every process of a stage is ready before the next stage starts, and stages
stop in reverse order: pool nodes, then commands by their stages, then workers, then the router. Addresses are
wired here and only here: a worker's `[pool]` gets the pool nodes, the router gets the workers. What a file
gives explicitly is kept.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from pathlib import Path
from typing import Final

from pdserve.errors import ConfigError
from pdserve.resources.gpus import gpu_count
from pdserve.resources.machine import VISIBLE
from pdserve.settings.config_file import build_config
from pdserve.up.config import (
    WORKER_ROLES,
    ClusterFile,
    ClusterSettings,
    CommandConfig,
    ProcessKeys,
    Role,
    Table,
    filled,
    filled_table,
    merge,
    ports_in,
)
from pdserve.up.hosts import (
    Demand,
    Site,
    as_seen_from,
    bracketed,
    open_pool_node,
    open_worker,
    share_token,
)
from pdserve.up.spec import (
    METRICS_HOST,
    STOP_SLACK_S,
    ConnectReady,
    HttpReady,
    Listening,
    Plan,
    ProcessSpec,
)
from pdserve.up.upgrade import pool_upgrade

MEMORY: Final = Path("/dev/shm")
"""Where pool nodes hold pages that their tables give no other place: by user, cluster and run directory, so
that clusters of one host are not in each other's way, and one started again finds its own.
"""
GPU_START_TIMEOUT_S: Final = 1800.0
"""Longest start of a worker on GPUs where the file says nothing: weights come from a slow network disk, and
host memory is pinned page by page.
"""
GPU_RELEASE_S: Final = 120.0
"""What such a worker may take beyond its grace to give its pinned memory back."""
SOCKET_PATH_MAX_BYTES: Final = 107  # sun_path is 108 bytes on Linux, the last one a zero


def demands(file: ClusterFile) -> list[Demand]:
    """The processes of a cluster file, for a place with several hosts. Raises ConfigError."""
    return [
        Demand(
            draft.name,
            draft.role,
            tuple(draft.keys.place.hosts),
            draft.gpus,
            draft.gpu_numbers,
            draft.keys.place.beside,
        )
        for draft in _drafts(file)
    ]


def make_plan(
    file: ClusterFile,
    *,
    program: Sequence[str],
    run_dir: Path,
    uid: int,
    ports: Iterator[int],
    extra_args: Sequence[str] = (),
    cluster_token: str = "",
    admin_key: str = "",
    site: Site | None = None,
    has_gpus: bool = False,
    before: Plan | None = None,
) -> Plan:
    """The plan of a cluster file.

    `program` runs pdserve (`python -m pdserve`); `run_dir` is absolute; `uid`: the user's; `ports` yields
    free ones; `extra_args` go to SGLang in every worker; `cluster_token`, where not empty, to workers and
    router, unless the file gives one; `admin_key`, where not empty, opens the router's admin port on this
    host, unless the file has one; `site`: the hosts, where there are several; `has_gpus`: this host has some;
    `before`: another plan, whose processes keep their free ports. Raises ConfigError: a name or a port is
    given twice, a bad key.
    """
    drafts = list(_drafts(file))
    _refuse_repeats("name", (draft.name for draft in drafts))
    _offer_ports(drafts, ports, before)
    _assign_ports(drafts, file.cluster.host, site)
    pool = [draft for draft in drafts if draft.role == "pool"]
    mark = hashlib.sha256(str(run_dir).encode()).hexdigest()[:8]
    nodes = _wire_pool(pool, MEMORY / f"pdserve-{uid}" / f"{file.cluster.name}-{mark}", run_dir, site)
    sockets = {draft.name: one for draft in pool for one in draft.config["listen"] if one.startswith("unix:")}
    workers = [draft for draft in drafts if draft.role in WORKER_ROLES]
    beside = {draft.name: site.hosts[draft.name] for draft in pool if site is not None and _beside(draft)}
    for draft in workers:
        seen = [one for one in nodes if beside.get(one["node"], draft.host) == draft.host]
        _wire_worker(draft, seen, sockets, site, extra_args)
    routers = [draft for draft in drafts if draft.role == "router"]
    for router in routers:
        _administer(router, admin_key)
    if cluster_token:
        doors = [_sub_table(router, "access") for router in routers]
        share_token(cluster_token, [draft.config for draft in workers], doors)
    commands = [draft for draft in drafts if draft.role == "command"]
    access = _sub_table(routers[0], "access") if routers and commands else {"cluster_token": cluster_token}
    shared = {
        "pool": json.dumps(nodes),
        "run_dir": str(run_dir),
        "model": str(file.worker.get("engine", {}).get("model_path", "")),
        "token": str(access.get("cluster_token", "")),
    }
    for draft in commands:
        _wire_command(draft, drafts, shared)
    _list_at_routers([*commands, *workers], routers)
    for draft in (*workers, *routers):  # they have to end on their own before the supervisor ends them
        own_s = max(0.0, file.cluster.stop_grace_s - STOP_SLACK_S[draft.role])
        draft.config.setdefault("stop_grace_s", own_s)
    by_stage = _by_stage(commands)
    stages = (pool, *by_stage[:-1], [*by_stage[-1], *workers], routers)
    named = {(one.host, number): one.name for one in workers for number in one.gpu_numbers}
    return Plan(
        settings=file.cluster,
        stages=tuple(
            tuple(_on_gpus(_spec(draft, program, run_dir), file.cluster, named, has_gpus) for draft in stage)
            for stage in stages
            if stage
        ),
        router_url=_url(routers[0] if routers else by_stage[-1][-1]),
    )


@dataclass
class _Draft:
    """A process while its addresses are being filled in."""

    role: Role
    table: str
    name: str
    keys: ProcessKeys
    config: Table
    env: Mapping[str, str]
    gpus: int = 0
    """That it asks for; 0: as many as its flags need, where there are any."""
    gpu_numbers: tuple[int, ...] = ()
    host: str = ""
    """Where it is reached; empty: on this host."""
    listening: tuple[Listening, ...] = ()
    argv: tuple[str, ...] = ()
    """Of a process that is not pdserve's; so are the next two."""
    ready: str = ""
    stage: int = 0
    listed: str = ""
    """The router's list that it stands in."""
    ports: Iterator[int] = field(default_factory=lambda: iter(()))
    """Free ones; those that it had in an earlier plan come first."""
    automatic_ports: tuple[int, ...] = ()

    def free_port(self) -> int:
        """One that no other process has, and none asks for."""
        port = next(self.ports)
        self.automatic_ports += (port,)
        return port


def _drafts(file: ClusterFile) -> Iterator[_Draft]:
    """Every process of the file in start order, the routers last."""
    for i, table in enumerate(file.pool):
        yield _draft(file, "pool", f"pool[{i}]", f"pool{i}", table)
    for i, table in enumerate(file.command):
        yield _draft(file, "command", f"command[{i}]", f"command{i}", table)
    for role in WORKER_ROLES:
        for i, table in enumerate(getattr(file, role)):
            yield _draft(file, role, f"{role}[{i}]", f"{role}{i}", merge(file.worker, table))
    for i, table in enumerate(file.routers):
        yield _draft(file, "router", "router", f"router{i}" if len(file.routers) > 1 else "router", table)


def _draft(file: ClusterFile, role: Role, where: str, name: str, table: Table) -> _Draft:
    config = copy.deepcopy(table)
    own = {key: config.pop(key) for key in ProcessKeys.__struct_fields__ if key in config}
    keys = build_config(ProcessKeys, {"name": name, **own}, source=f"[{where}]")
    is_worker = role in WORKER_ROLES
    if "gpus" in own and not is_worker:
        raise ConfigError(f"'{where}.gpus': only workers have GPUs")
    words = keys.env.get(VISIBLE, "").split(",")
    numbers = tuple(keys.gpus) if isinstance(keys.gpus, list) else ()
    if is_worker and not keys.gpus and all(word.strip().isdecimal() for word in words):
        numbers = tuple(map(int, words))
    gpus = len(numbers) or (keys.gpus if isinstance(keys.gpus, int) else 0)
    listed = role if is_worker else ""
    return _Draft(role, where, keys.name, keys, config, keys.env, gpus, numbers, listed=listed)


def _offer_ports(drafts: list[_Draft], ports: Iterator[int], before: Plan | None) -> None:
    kept = {spec.name: spec.automatic_ports for spec in before.processes} if before else {}
    asked = {port for draft in drafts for port in ports_in(draft.config)}
    offered = (port for port in ports if port not in asked)
    for draft in drafts:
        draft.ports = chain(kept.get(draft.name, ()), offered)


def _assign_ports(drafts: list[_Draft], default_host: str, site: Site | None) -> None:
    """Give every worker and the router a host and a port; a port of 0, or none, is an automatic one."""
    for draft in drafts:
        draft.host = "" if site is None else site.hosts[draft.name]
    homes = {id(draft): _home(draft) for draft in drafts if draft.role != "pool"}
    chosen = [(draft, port) for draft in drafts if (port := homes.get(id(draft), {}).get("port"))]
    _refuse_repeats("port", (f"{port} on {draft.host}" if draft.host else port for draft, port in chosen))
    for draft in drafts:
        if (home := homes.get(id(draft))) is None:
            continue
        is_far = site is not None and (draft.role != "router" or draft.name in site.far)
        host = home.setdefault("host", site.all_interfaces(draft.name) if site and is_far else default_host)
        is_chosen = bool(home.get("port"))
        if not is_chosen:
            home["port"] = draft.free_port()
        draft.listening = (Listening(host, home["port"], is_chosen),)
        if draft.role == "prefill" and draft.config.get("handoff") == "direct":
            draft.listening += (_bootstrap(draft, host),)


def _bootstrap(draft: _Draft, host: str) -> Listening:
    """Where decode workers find a prefill worker that hands over directly."""
    direct = _sub_table(draft, "direct")
    chosen = "bootstrap_port" in direct
    if not chosen:
        direct["bootstrap_port"] = draft.free_port()
    port = direct["bootstrap_port"]
    if isinstance(port, bool) or not isinstance(port, int):
        raise ConfigError(f"'{draft.table}.direct.bootstrap_port' must be a number, found {port!r}")
    return Listening(host, port, chosen)


def _home(draft: _Draft) -> Table:
    """The table that holds a process's `host` and `port`: its own, or a worker's `[engine]`."""
    home = _sub_table(draft, "engine") if draft.role in WORKER_ROLES else draft.config
    port = home.get("port", 0)
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 65536:
        raise ConfigError(f"'{draft.table}' port must be a number from 0 to 65535, found {port!r}")
    if not isinstance(host := home.get("host", ""), str):
        raise ConfigError(f"'{draft.table}' host must be a string, found {host!r}")
    return home


def _wire_pool(pool: Sequence[_Draft], arena_dir: Path, run_dir: Path, site: Site | None) -> list[Table]:
    """Fill in the addresses of pool nodes; returns how clients find them."""
    nodes = [_wire_pool_node(draft, arena_dir, run_dir, site) for draft in pool]
    # those beside workers come and go with them, and are no reason to start the others again
    lasting = [node["address"] for draft, node in zip(pool, nodes, strict=True) if not _beside(draft)]
    for draft in pool:
        draft.config.setdefault("metrics", f"{METRICS_HOST}:{draft.free_port()}")
        if len(lasting) > 1 or _beside(draft):
            _sub_table(draft, "cluster").setdefault("peers", lasting)
    return nodes


def _beside(draft: _Draft) -> str:
    """The process for whose host this pool node is; empty: for all."""
    return draft.keys.place.beside


def _wire_pool_node(draft: _Draft, arena_dir: Path, run_dir: Path, site: Site | None) -> Table:
    """Fill in a pool node's addresses; returns how clients find it."""
    draft.config["name"] = draft.name
    draft.config.setdefault("arena_dir", str(arena_dir))
    socket_path = run_dir / f"{draft.name}.sock"
    is_automatic = "listen" not in draft.config
    if is_automatic:
        if len(str(socket_path).encode()) > SOCKET_PATH_MAX_BYTES:
            raise ConfigError(
                f"{run_dir}: too long for a socket in it; "
                f"give a shorter cluster.run_dir, or {draft.table}.listen"
            )
        own = [f"unix:{socket_path}"]
        if site is not None:
            own = [f"tcp:{bracketed(site.all_interfaces(draft.name))}:{draft.free_port()}", *own]
        draft.config["listen"] = own
    listen = draft.config["listen"]
    if not isinstance(listen, list) or not listen or not all(isinstance(address, str) for address in listen):
        raise ConfigError(f"'{draft.table}.listen' must be a list of addresses, found {listen!r}")
    tcp = [address for address in listen if address.startswith("tcp:")]
    draft.listening = tuple(_listening(draft, address, chosen=not is_automatic) for address in tcp)
    if site is None:
        return {"node": draft.name, "address": listen[0]}
    if not draft.listening:
        raise ConfigError(f"'{draft.table}.listen' needs an address tcp:HOST:PORT, for the other hosts")
    return {"node": draft.name, "address": open_pool_node(draft.config, site, draft.listening[0].port)}


def _wire_worker(
    draft: _Draft,
    nodes: list[Table],
    sockets: Mapping[str, str],
    site: Site | None,
    extra_args: Sequence[str],
) -> None:
    """Give a worker the pool, and the flags of the command line."""
    seen = nodes if site is None else as_seen_from(nodes, sockets, site, draft.name)
    _sub_table(draft, "pool").setdefault("nodes", seen)
    if site is not None:
        open_worker(draft.config, site, _url(draft))
    if extra_args:
        engine = _sub_table(draft, "engine")
        engine["extra_args"] = [*_list(draft, engine, "extra_args"), *extra_args]


def _wire_command(draft: _Draft, drafts: Sequence[_Draft], shared: Mapping[str, str]) -> None:
    """Fill in a command's words, variables and file. `shared`: values that are the same for all of them."""
    given = build_config(CommandConfig, draft.config, source=f"[{draft.table}]")
    processes = {one.name: one for one in drafts if one.listening}
    further: dict[str, int] = {}

    def find(name: str, of: str) -> str:
        if of and of not in processes:
            raise ConfigError(f"'{draft.table}': no process {of!r} of this cluster listens")
        one = processes[of] if of else draft
        if name == "token":
            raise ConfigError(f"'{draft.table}': {{token}} may stand in env alone: others read command lines")
        if name.startswith("port") and name != "port":
            return str(further.get(name) or further.setdefault(name, draft.free_port()))
        values = {
            "host": one.listening[0].host if one is draft else _reached(one),
            "port": str(one.listening[0].port),
            "url": _url(one),
            "config": f"{shared['run_dir']}/{draft.name}.toml",
        }
        return {**values, **shared}[name]

    draft.env = {
        key: filled(value, lambda name, of: shared["token"] if name == "token" else find(name, of))
        for key, value in draft.env.items()
    }
    draft.argv = tuple(filled(word, find) for word in given.argv)
    draft.ready = filled(given.ready.replace("{host}", bracketed(_reached(draft))), find)
    draft.listed, draft.stage = given.role, given.stage
    draft.config = filled_table(given.config, find)


def _administer(router: _Draft, key: str) -> None:
    """Fill in what the live page needs. What is empty in the file is what launch/router.toml has."""
    admin = _sub_table(router, "admin")
    if key and admin.get("port") is None:
        admin["port"] = router.free_port()
        if not admin.get("key") and not admin.get("key_file"):
            admin["key"] = key


def _listening(draft: _Draft, address: str, *, chosen: bool) -> Listening:
    host, _, port = address.removeprefix("tcp:").rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"'{draft.table}.listen': '{address}' is not of the form tcp:HOST:PORT")
    return Listening(host.strip("[]"), int(port), chosen)


def _spec(draft: _Draft, program: Sequence[str], run_dir: Path) -> ProcessSpec:
    config_path = run_dir / f"{draft.name}.toml"
    command = ("pool", "serve") if draft.role == "pool" else (draft.role,)
    argv = draft.argv or (*program, *command, "--config", str(config_path))
    ready: HttpReady | ConnectReady
    upgrade = None
    if draft.role == "pool":
        reached = draft.config["cluster"]["advertise"] if draft.host else draft.config["listen"][0]
        ready, upgrade = ConnectReady(reached), pool_upgrade(program, reached, draft.config)
    else:
        path = "/ready" if draft.role == "router" else "/pd/ready"
        tls = _tls(draft)
        own = (str(tls["certificate"]), str(tls.get("key"))) if tls.get("client_ca") else None
        url = draft.ready or _url(draft) + path
        ready = ConnectReady(url) if url.startswith("tcp:") else HttpReady(url, own)
    return ProcessSpec(
        name=draft.name,
        role=draft.role,
        table=draft.table,
        argv=argv,
        config=draft.config,
        config_path=config_path,
        log_path=run_dir / f"{draft.name}.log",
        ready=ready,
        restart=draft.keys.restart,
        listening=draft.listening,
        automatic_ports=draft.automatic_ports,
        env=draft.env,
        start_timeout_s=draft.keys.start_timeout_s or None,
        release_s=draft.keys.release_s,
        gpu_count=_gpu_count(draft),
        needs_gpus=draft.gpus > 0,
        gpu_numbers=draft.gpu_numbers,
        host=draft.host,
        upgrade=upgrade,
    )


def _on_gpus(
    spec: ProcessSpec, settings: ClusterSettings, named: Mapping[tuple[str, int], str], has_gpus: bool
) -> ProcessSpec:
    """With the times that GPUs need, where the file gives none, and without those of others. `named`: who
    names GPUs of which host; `has_gpus`: this host has some.
    """
    if not spec.gpu_count:
        return spec
    others = tuple(
        number for (host, number), name in named.items() if host == spec.host and name != spec.name
    )
    spec = replace(spec, gpus_of_others=others)
    if not spec.needs_gpus and not (has_gpus and not spec.host):
        return spec
    is_default = settings.start_timeout_s == ClusterSettings().start_timeout_s
    return replace(
        spec,
        has_gpus=True,
        start_timeout_s=spec.start_timeout_s or (GPU_START_TIMEOUT_S if is_default else None),
        release_s=spec.release_s or GPU_RELEASE_S,
    )


def _gpu_count(draft: _Draft) -> int:
    """Raises ConfigError where its table asks for others than its flags need."""
    if draft.role not in WORKER_ROLES:
        return 0
    engine = _sub_table(draft, "engine")
    try:
        count = gpu_count(
            [str(word) for word in _list(draft, engine, "extra_args")], engine.get("device", "auto")
        )
    except ConfigError as error:
        raise ConfigError(f"'{draft.table}': {error}") from None
    if draft.gpus and not count:
        raise ConfigError(f"'{draft.table}.gpus': it runs on the CPU")
    if draft.gpus not in (0, count):
        raise ConfigError(f"'{draft.table}.gpus' is {draft.gpus}, and its flags need {count}")
    return count


def _list_at_routers(served: Sequence[_Draft], routers: Sequence[_Draft]) -> None:
    for draft, router in product(served, routers):
        if draft.listed:
            listed = _list(router, router.config, draft.listed)
            router.config[draft.listed] = [*listed, _url(draft)]
    if any(map(_tls, served)) and routers and not _sub_table(routers[0], "tls").get("ca"):
        raise ConfigError("'router.tls.ca' is needed: who signed the certificates of the workers")


def _by_stage(commands: Sequence[_Draft]) -> list[list[_Draft]]:
    """At least one stage, which may be empty."""
    numbers = sorted({draft.stage for draft in commands})
    return [[draft for draft in commands if draft.stage == number] for number in numbers] or [[]]


def _sub_table(draft: _Draft, key: str) -> Table:
    table = draft.config.setdefault(key, {})
    if not isinstance(table, dict):
        raise ConfigError(f"'{draft.table}.{key}' must be a table, found {table!r}")
    return table


def _list(draft: _Draft, table: Table, key: str) -> list[object]:
    """A copy of what the list there holds; empty where there is none."""
    if not isinstance(value := table.get(key, []), list):
        raise ConfigError(f"'{key}' of '{draft.table}' must be a list, found {value!r}")
    return list(value)


def _url(draft: _Draft) -> str:
    host, port = _reached(draft), draft.listening[0].port
    access = draft.config.get("access")
    is_tls = _tls(draft) or (
        draft.role == "router" and isinstance(access, dict) and access.get("tls_cert_file")
    )
    return f"{'https' if is_tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _reached(draft: _Draft) -> str:
    """The host by which others reach it."""
    host = draft.listening[0].host
    return {"0.0.0.0": draft.host or "127.0.0.1", "::": draft.host or "::1"}.get(host, host)


def _tls(draft: _Draft) -> Table:
    """The `tls` table of a worker that speaks TLS; else empty."""
    tls = draft.config.get("tls")
    if draft.role not in WORKER_ROLES or not isinstance(tls, dict) or not tls.get("certificate"):
        return {}
    return tls


def _refuse_repeats(what: str, values: Iterable[object]) -> None:
    seen: set[object] = set()
    for value in values:
        if value in seen:
            raise ConfigError(f"{what} {value} is given to two processes of the cluster")
        seen.add(value)
