"""A cluster file fitted to a machine: GPUs, host memory, page sizes and time-outs go into its tables. Pure.

Where the machine has no GPU, or no worker is for one, the file stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from pdserve.capacity.drafts import with_draft
from pdserve.capacity.facts import Fit, Machine, Model, PoolNeed, WorkerFit, WorkerNeed
from pdserve.capacity.plan import make_fit
from pdserve.capacity.tables import VISIBLE, pool_need, worker_need
from pdserve.errors import ConfigError
from pdserve.up.config import WORKER_ROLES, ClusterFile, ClusterSettings, Table, merge


def fitted(
    file: ClusterFile, extra_args: Sequence[str], machine: Machine, read_model: Callable[[Path], Model]
) -> tuple[ClusterFile, Fit | None]:
    """(the file, filled in; what its processes get, None without GPUs). Raises ConfigError.

    What the file says stays. `extra_args`: flags for SGLang in every worker.
    """
    tables = {role: [merge(file.worker, table) for table in getattr(file, role)] for role in WORKER_ROLES}
    needs: list[WorkerNeed] = []
    models: dict[str, Model] = {}
    places: dict[str, Table] = {}
    known: dict[tuple[str, str, str], Model] = {}
    for role in WORKER_ROLES:
        for i, (name, table) in enumerate(_named(role, tables[role])):
            where = f"{role}[{i}]"
            found = worker_need(name, role, where, table, extra_args)
            if table.pop("gpus", None) is not None and (found is None or not machine.gpus):
                raise ConfigError(f"'{where}.gpus': {'it runs on the CPU' if found is None else _NONE}")
            if found is None or not machine.gpus:
                continue
            need, path = found
            if name in places:
                raise ConfigError(f"name {name} is given to two processes of the cluster")
            needs.append(need)
            key = path, need.draft_algorithm, need.draft_path
            known[key] = known.get(key) or with_draft(path, need, lambda one: read_model(Path(one)))
            models[name], places[name] = known[key], table
    if not needs:
        return file, None
    pools = [_pool_need(i, table) for i, table in enumerate(file.pool)]
    fit = make_fit(machine, needs, models, pools)
    for need, worker in zip(needs, fit.workers, strict=True):
        _fill(places[need.name], need, worker, file.cluster)
    nodes = [
        table | {"capacity_bytes": fitted_pool.capacity_bytes, "slab_bytes": fitted_pool.slab_bytes}
        for table, fitted_pool in zip(file.pool, fit.pools, strict=True)
    ]
    return replace(file, **tables, worker={}, pool=nodes), fit


def pinned(file: ClusterFile, before: ClusterFile) -> ClusterFile:
    """`file` with what its processes got before, when `before` was fitted. Its new workers get the rest."""
    had = {name: table for role in WORKER_ROLES for name, table in _named(role, getattr(before, role))}
    tables: dict[str, list[Table]] = {}
    for role in WORKER_ROLES:
        tables[role] = []
        for name, table in _named(role, [merge(file.worker, one) for one in getattr(file, role)]):
            fit = had.get(name)
            if fit is not None and VISIBLE in fit.get("env", {}):
                gpus = [int(index) for index in fit["env"][VISIBLE].split(",")]
                table = {**fit, "env": table.get("env", {}), "gpus": gpus}
            tables[role].append(table)
    return replace(file, **tables, worker={}, pool=before.pool)


_NONE = "this machine has no GPU"


def _named(role: str, tables: Sequence[Table]) -> list[tuple[str, Table]]:
    return [(str(table.get("name", f"{role}{i}")), table) for i, table in enumerate(tables)]


def _pool_need(number: int, table: Table) -> PoolNeed:
    return pool_need(str(table.get("name", f"pool{number}")), f"pool[{number}]", table)


def _fill(table: Table, need: WorkerNeed, fit: WorkerFit, settings: ClusterSettings) -> None:
    engine = table["engine"] = dict(table.get("engine", {}))
    if need.page_size is None:
        engine["page_size"] = fit.page_size
    if fit.host_gb and not need.hicache_size_gb:
        engine["hicache_size_gb"] = fit.host_gb
    # in the order of NVML, which counts by PCI address; CUDA's own order is the fastest first
    visible = {VISIBLE: ",".join(map(str, fit.gpus)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    table["env"] = {**table.get("env", {}), **visible}
    table.setdefault("release_s", fit.release_s)
    if settings.start_timeout_s == ClusterSettings().start_timeout_s:
        table.setdefault("start_timeout_s", fit.start_timeout_s)
