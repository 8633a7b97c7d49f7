"""Which GPUs each worker gets. Pure.

Workers whose table names GPUs get these. The others get theirs largest first, out of the NUMA node with the
fewest free ones that still has enough, else the first that are free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pdserve.capacity.facts import Gpu, Machine, Nic, WorkerNeed
from pdserve.errors import ConfigError


def assign(machine: Machine, workers: Sequence[WorkerNeed]) -> dict[str, tuple[int, ...]]:
    """Indices of GPUs by worker. Raises ConfigError where they do not fit."""
    free = {gpu.index: gpu for gpu in machine.gpus}
    given: dict[str, tuple[int, ...]] = {}
    for worker in workers:
        if worker.gpus is not None:
            _take_named(worker, worker.gpus, free, machine, given)
    left = [worker for worker in workers if worker.gpus is None]
    wanted = sum(worker.ranks for worker in left)
    if wanted > len(free):
        sums = " + ".join(f"{worker.name} {worker.ranks}" for worker in left)
        raise ConfigError(
            f"{sums} = {wanted} GPUs are needed (tp x pp of each worker), and {len(free)} of "
            f"{len(machine.gpus)} are free here: lower --tp-size, or start fewer workers"
        )
    for worker in sorted(left, key=lambda one: -one.ranks):  # sorted keeps the order of equals
        taken = _chosen(worker.ranks, list(free.values()))
        given[worker.name] = taken
        for index in taken:
            del free[index]
    return {worker.name: given[worker.name] for worker in workers}


def near(machine: Machine, gpus: Sequence[int]) -> tuple[set[int], list[Nic]]:
    """The NUMA nodes of these GPUs, where known, and the NICs there."""
    nodes = {gpu.numa_node for gpu in machine.gpus if gpu.index in gpus and gpu.numa_node is not None}
    return nodes, [nic for nic in machine.nics if nic.numa_node in nodes]


def _take_named(
    worker: WorkerNeed,
    named: tuple[int, ...],
    free: dict[int, Gpu],
    machine: Machine,
    given: dict[str, tuple[int, ...]],
) -> None:
    if len(named) != worker.ranks or len(set(named)) != len(named):
        raise ConfigError(
            f"{worker.name}: gpus = {list(named)} must be {worker.ranks} different GPUs "
            f"(tp {worker.tp} x pp {worker.pp}" + (f" x dp {worker.dp})" if worker.dp > 1 else ")")
        )
    for index in named:
        if index not in free:
            owner = next((name for name, taken in given.items() if index in taken), "")
            there = ", ".join(str(gpu.index) for gpu in machine.gpus) or "none"
            why = f"is {owner}'s already" if owner else f"is not here (there are {there})"
            raise ConfigError(f"{worker.name}: GPU {index} of its gpus {why}: name another")
        del free[index]
    given[worker.name] = named


def _chosen(count: int, free: Sequence[Gpu]) -> tuple[int, ...]:
    sizes = Counter(gpu.numa_node for gpu in free if gpu.numa_node is not None)
    homes = sorted((size, node) for node, size in sizes.items() if size >= count)
    if homes:
        free = [gpu for gpu in free if gpu.numa_node == homes[0][1]]
    return tuple(sorted(gpu.index for gpu in free)[:count])
