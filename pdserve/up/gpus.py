"""Which GPUs of this host each worker of a plan computes on. Pure.

Other hosts' launchers choose there (launchers/agent.py), by the same rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pdserve.errors import ConfigError
from pdserve.resources.gpus import GpuRequest, assign, visible
from pdserve.resources.machine import VISIBLE, Machine
from pdserve.up.plan import Plan, ProcessSpec, on_gpus

Given = Mapping[str, tuple[int, ...]]
"""Numbers of GPUs by worker."""


def with_gpus(plan: Plan, machine: Machine, kept: Given | None = None) -> tuple[Plan, Given]:
    """(the plan, each worker with GPUs of `machine`; which). Without a GPU the plan stays as it is. `kept`:
    what workers that run already have. Raises ConfigError: there are too few, or a table names one that is
    not here.
    """
    if not machine.gpus:
        if named := next((spec for spec in plan.processes if spec.needs.gpus), None):
            raise ConfigError(f"'{named.table}.gpus': this machine has no GPU")
        return plan, {}
    workers = [spec for spec in plan.processes if spec.gpu_count]
    had = kept or {}
    requests = [
        GpuRequest(spec.name, spec.gpu_count, had.get(spec.name) or _numbers(spec)) for spec in workers
    ]
    given = assign(machine, requests)
    ready = {
        spec.name: on_gpus(replace(spec, env={**spec.env, **visible(given[spec.name])}), plan.settings)
        for spec in workers
    }
    stages = tuple(tuple(ready.get(spec.name, spec) for spec in stage) for stage in plan.stages)
    return replace(plan, stages=stages), given


def _numbers(spec: ProcessSpec) -> tuple[int, ...] | None:
    """The GPUs that its table names; None: any. Raises ConfigError."""
    if spec.needs.gpu_numbers or VISIBLE not in spec.env:
        return spec.needs.gpu_numbers or None
    words = [word.strip() for word in spec.env[VISIBLE].split(",")]
    if not all(word.isdecimal() for word in words):
        raise ConfigError(f"'{spec.table}.env': {VISIBLE} = {spec.env[VISIBLE]!r}: write gpus = [..] instead")
    return tuple(map(int, words))
