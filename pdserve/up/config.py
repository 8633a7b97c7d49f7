"""The cluster file of `pdserve up`.

The supervisor reads `[cluster]` and a few keys of every process table: `ProcessKeys`, `count`, and `base`, a
file of defaults. The rest of a table is that process's own configuration. It is handed on as it stands, but
for what plan.py fills in.

`[[command]]` is a process that is not pdserve's, by its command line. The supervisor starts, watches and
stops it like its own processes: another engine's worker behind the router, a cache server between that and
the pool, another stack's frontend. In `argv`, `env`, `ready` and the strings of `config` it fills in:

    {host} {port}           where it listens; a port of 0 is a free one
    {port2} {port3} ...     further free ports of its own
    {host:NAME} {port:NAME} {url:NAME}    where another process of the cluster listens, and its http:// URL
    {pool}                  the pool's nodes, as JSON; where it is a whole string of `config`, the list itself
    {model}                 worker.engine.model_path of the cluster file, which --model gives
    {config}                the path of a TOML file with its `config`
    {run_dir}               the cluster's
    {token}                 the token of the cluster; in `env` alone, since others can read command lines
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import Meta

from pdserve.errors import ConfigError
from pdserve.settings.config_file import load_config, read_toml

PLACEHOLDER: Final = re.compile(
    r"\{(host|port\d?|url|pool|model|config|run_dir|token)(?::([A-Za-z0-9._-]+))?\}"
)
OF_OTHERS: Final = ("host", "port", "url")
POOL: Final = "{pool}"


class CommandConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[[command]]`: one process by its command line."""

    argv: Annotated[list[str], Meta(min_length=1)]
    """Its command line."""
    host: str = "127.0.0.1"
    """Address that it listens on."""
    port: int = 0
    """Port that it listens on; 0 takes a free one."""
    ready: str = "http://{host}:{port}/health"
    """It is ready when this URL answers 200, or tcp:HOST:PORT takes a connection."""
    role: Literal["", "prefill", "decode", "agg"] = ""
    """The router's list that it stands in, as http://HOST:PORT; empty: none."""
    stage: Annotated[int, Meta(ge=0, le=9)] = 0
    """It starts once the commands of lower stages are ready."""
    config: dict[str, Any] = {}
    """Content of the file that {config} names."""


Find = Callable[[str, str], str]
"""The value of a placeholder, by its name and that of another process, or nothing. Raises ConfigError."""


def filled(text: str, find: Find) -> str:
    """With its placeholders filled in. Raises ConfigError."""

    def found(match: re.Match[str]) -> str:
        name, of = match[1], match[2] or ""
        if of and name not in OF_OTHERS:
            raise ConfigError(f"{match[0]}: only host, port and url may be another process's")
        return find(name, of)

    return PLACEHOLDER.sub(found, text)


def filled_table(value: Any, find: Find) -> Any:
    """The same of all strings of a table. Raises ConfigError."""
    if isinstance(value, Mapping):
        return {key: filled_table(one, find) for key, one in value.items()}
    if isinstance(value, list):
        return [filled_table(one, find) for one in value]
    if value == POOL:
        return json.loads(find("pool", ""))
    return filled(value, find) if isinstance(value, str) else value


Role = Literal["pool", "command", "prefill", "decode", "agg", "elastic", "router"]
"""A process's role; also its table in the cluster file, and the sub-command that runs it if it is pdserve's.
"""

WorkerRole = Literal["prefill", "decode", "agg", "elastic"]
WORKER_ROLES: tuple[WorkerRole, ...] = get_args(WorkerRole)

Restart = Literal["never", "on-failure"]
MAX_COUNT: Final = 10_000
Table = dict[str, Any]


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[cluster]`: what the supervisor itself needs."""

    name: str = "cluster"
    """Name of the cluster, in messages."""
    run_dir: Path = Path("logs/cluster")
    """Directory of logs, generated configuration and sockets; one cluster at a time."""
    host: str = "127.0.0.1"
    """Address that workers listen on, unless their own table sets it."""
    stop_on_loss: bool = False
    """Stop the cluster, with status 1, when any process has ended for good. If false, only the router's end
    stops it.
    """
    start_parallelism: Annotated[int, Meta(ge=0)] = 0
    """Processes that may be starting at the same time. 0: on each host as many as this one has processors,
    and workers with GPUs of their own all at once.
    """
    start_timeout_s: Annotated[float, Meta(gt=0)] = 300.0
    """Longest time from the start of a process until it is ready. Left as it is, workers on GPUs get longer,
    by the size of model and host memory.
    """
    stop_grace_s: Annotated[float, Meta(gt=0)] = 40.0
    """Time between SIGTERM and SIGKILL of a process; it finishes running requests meanwhile."""
    max_restarts: Annotated[int, Meta(ge=0)] = 5
    """Most restarts of one process within 5 minutes; after that it stays stopped."""
    hosts: list[str] = []
    """Hosts for `--on ssh`, as `NAME` or `NAME=ADDRESS`: how ssh calls one, and how the others reach it."""


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`place` of a process."""

    hosts: list[str] = []
    """Hosts that it may run on, by name; empty: any."""
    beside: str = ""
    """A process on whose host it runs; empty: any."""


Gpu = Annotated[int, Meta(ge=0)]


class ProcessKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the supervisor reads in the table of every process."""

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    """Its files are called so, too."""
    restart: Restart = "on-failure"
    """Whether it is started again when it ends unexpectedly."""
    env: dict[str, str] = {}
    """Variables of its environment."""
    start_timeout_s: Annotated[float, Meta(ge=0)] = 0.0
    """Longest time until it is ready; 0: the cluster's."""
    release_s: Annotated[float, Meta(ge=0)] = 0.0
    """What it may take beyond its grace to give its memory back."""
    place: Place = Place()
    gpus: Gpu | list[Gpu] = 0
    """Of a worker: how many GPUs it takes, or the numbers of those that it gets."""


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole cluster file."""

    cluster: ClusterSettings = ClusterSettings()
    router: Table = {}
    """The router's configuration."""
    worker: Table = {}
    """Defaults of all workers."""
    pool: list[Table] = []
    """Pool nodes."""
    prefill: list[Table] = []
    """Prefill workers."""
    decode: list[Table] = []
    """Decode workers."""
    agg: list[Table] = []
    """Aggregated workers."""
    elastic: list[Table] = []
    """Elastic workers."""
    command: list[Table] = []
    """Processes that are not pdserve's, by their command lines."""

    @property
    def routers(self) -> list[Table]:
        """The router's table, as often as its `count` says."""
        own = {key: value for key, value in self.router.items() if key != "count"}
        return [own] * self.router.get("count", 1)


def read_cluster_file(
    path: Path, overrides: Mapping[str, Any], counts: Mapping[WorkerRole, int | None]
) -> ClusterFile:
    """Read a cluster file, lay flags over it and bring each kind of worker to its wanted count.

    A larger count repeats the last table of that kind (without its name and port), a smaller one drops the
    last ones; None leaves the file's tables. Raises ConfigError.
    """
    file = load_config(ClusterFile, path, overrides)
    if not _counted(path, "router", [file.router]) and not file.command:
        raise ConfigError(f"{path}: 'router.count' must be 1 or more, but beside [[command]]")
    lists = {
        role: [_based(path, table) for table in _counted(path, role, getattr(file, role))]
        for role in ("pool", "command", *WORKER_ROLES)
    }
    whole = msgspec.structs.replace(
        file,
        router=_based(path, file.router),
        worker=_based(path, file.worker),
        **lists,
    )
    return resized(whole, counts, str(path))


def resized(file: ClusterFile, counts: Mapping[WorkerRole, int | None], source: str) -> ClusterFile:
    """The file with other numbers of workers, as `read_cluster_file` says. Raises ConfigError."""
    tables: dict[str, list[Table]] = {role: getattr(file, role) for role in WORKER_ROLES}
    for role, count in counts.items():
        if count is not None:
            tables[role] = _resized(tables[role], count)
    if not any(tables.values()) and not file.command:
        raise ConfigError(f"{source}: no worker: give [[prefill]] and [[decode]], or [[agg]], or [[elastic]]")
    if tables["prefill"] and not (tables["decode"] or tables["agg"] or tables["elastic"]):
        raise ConfigError(
            f"{source}: prefill workers need a [[decode]] or [[agg]] worker to answer, or [[elastic]]"
        )
    return msgspec.structs.replace(file, **tables)


def merge(defaults: Mapping[str, Any], table: Mapping[str, Any]) -> Table:
    """`table` over `defaults`, tables within them merged too."""
    merged = dict(defaults)
    for key, value in table.items():
        below = merged.get(key)
        merged[key] = (
            merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
        )
    return merged


def ports_in(value: object, key: str = "") -> Iterator[int]:
    """Every port that a table names, alone or behind an address."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from ports_in(one, name)
    elif isinstance(value, list):
        for one in value:
            yield from ports_in(one, key)
    elif isinstance(value, int) and (key == "port" or key.endswith("_port")):
        yield value
    elif isinstance(value, str) and (found := re.search(r":(\d{1,5})/?$", value)):
        yield int(found[1])


def _based(path: Path, table: Table) -> Table:
    """A process table over the file that its `base` names, relative to the cluster file."""
    if "base" not in table:
        return table
    own = {key: value for key, value in table.items() if key != "base"}
    if not isinstance(base := table["base"], str):
        raise ConfigError(f"{path}: 'base' must be the name of a TOML file, found {base!r}")
    return merge(read_toml(path.parent / base), own)


def _counted(path: Path, role: str, tables: list[Table]) -> list[Table]:
    """Each table as often as its `count` says, without it. A name gets numbers. Raises ConfigError."""
    made: list[Table] = []
    for i, table in enumerate(tables):
        own = {key: value for key, value in table.items() if key != "count"}
        count = table.get("count", 1)
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_COUNT:
            raise ConfigError(
                f"{path}: '{role}[{i}].count' must be a number up to {MAX_COUNT}, found {count!r}"
            )
        if count > 1 and "name" in own:
            made += [own | {"name": f"{own['name']}-{number}"} for number in range(count)]
        else:
            made += [own] * count
    return made


def _resized(tables: list[Table], count: int) -> list[Table]:
    if not 0 <= count <= MAX_COUNT:
        raise ConfigError(f"a number of workers cannot be {count}")
    pattern = {key: value for key, value in (tables[-1] if tables else {}).items() if key != "name"}
    if isinstance(engine := pattern.get("engine"), dict):
        pattern["engine"] = {key: value for key, value in engine.items() if key != "port"}
    return [*tables[:count], *([pattern] * (count - len(tables)))]
