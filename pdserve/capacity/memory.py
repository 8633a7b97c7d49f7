"""How much memory everything gets, on the GPUs and on the host. Pure.

Host memory is divided in this order:

1. A reserve for the system, for SGLang's own check, and for each rank's process.
2. What tables say: `hicache_size_gb`, `hicache_ratio`, `capacity_bytes`.
3. Workers' host pools get half of the rest, at most what SGLang itself would take (`HOST_RATIO`). Where that
   is too little for the longest prompt, they get up to three quarters.
4. Pool nodes get what is left, as far as /dev/shm holds it. What it cannot hold goes to the host pools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pdserve.capacity.facts import Gpu, Machine, Model, PoolNeed, WorkerNeed
from pdserve.capacity.model import rank_weight_bytes
from pdserve.errors import ConfigError

GB: Final = 10**9
GIB: Final = 1 << 30
MIB: Final = 1 << 20
HOST_RATIO: Final[Mapping[bool, float]] = {False: 2.0, True: 1.2}
"""SGLang's own host pool as a multiple of the device's; True: `buffer_only`."""
_SYSTEM_BYTES: Final = 10 * GIB  # SGLang wants this free beside its host pools
_SYSTEM_SHARE: Final = 0.05
_RANK_BYTES: Final = 4 * GIB  # a scheduler process: torch, CUDA's libraries, tokenizer
_SHM_SHARE: Final = 0.9  # SGLang's own broadcasts and torch need some
_CHUNKS: Final = ((20, 2048, 8), (35, 2048, 80), (60, 4096, 160), (90, 8192, 512), (160, 8192, 512))
"""(GPU memory below this many GiB, chunk of a prefill in tokens, batch of CUDA graphs): SGLang's
`handle_gpu_memory_settings`.
"""
_LARGEST: Final = (16384, 512)


def rounded(tokens: int) -> int:
    """To two digits: SGLang measures it later, and finds less or more."""
    return int(float(f"{tokens:.1e}"))


def device_kv_bytes(gpus: Sequence[Gpu], model: Model, worker: WorkerNeed) -> int:
    """About what is left for KV pages on the smallest of a worker's GPUs; SGLang measures it later. Negative:
    the weights do not fit.
    """
    memory = min(gpu.memory_bytes for gpu in gpus)
    share = worker.mem_fraction
    if share is None:
        gib = memory / GIB
        sizes = ((chunk, batch) for below, chunk, batch in _CHUNKS if gib < below)
        chunk, batch = next(sizes, _LARGEST)
        reserved = (512 + chunk * 1.5 + batch * 2 + worker.tp * worker.pp / 8 * 1024) * MIB
        share = 1 - max(reserved, 10 * GIB if gib > 60 else 0) / memory
    return int(memory * share) - rank_weight_bytes(model, worker)


def reserve_bytes(machine: Machine, workers: Sequence[WorkerNeed]) -> int:
    """Of host memory, given to no pool."""
    ranks = sum(worker.ranks for worker in workers)
    return _SYSTEM_BYTES + int(machine.memory_bytes * _SYSTEM_SHARE) + ranks * _RANK_BYTES


def explicit_host_bytes(worker: WorkerNeed, kv_bytes: int) -> int | None:
    """Of one rank, as the table says; None: the plan chooses."""
    if not worker.has_storage:
        return 0
    if worker.hicache_size_gb:
        return worker.hicache_size_gb * GB
    return None if worker.hicache_ratio is None else int(worker.hicache_ratio * kv_bytes)


def divide(
    machine: Machine,
    workers: Sequence[WorkerNeed],
    pools: Sequence[PoolNeed],
    kv_bytes: Mapping[str, int],
    needed_bytes: Mapping[str, int],
) -> tuple[dict[str, int], dict[str, int]]:
    """(host pool of one rank by worker, arena by pool node), in bytes.

    `kv_bytes`: KV on the device, of one rank by worker. `needed_bytes`: the smallest host pool that all pages
    of the longest prompt pass through. Raises ConfigError where tables ask for more than there is.
    """
    given = {worker.name: explicit_host_bytes(worker, kv_bytes[worker.name]) for worker in workers}
    fixed = sum((given[worker.name] or 0) * worker.ranks for worker in workers)
    fixed += sum(pool.capacity_bytes or 0 for pool in pools)
    reserve = reserve_bytes(machine, workers)
    left = machine.memory_bytes - reserve - fixed
    if left < 0:
        raise ConfigError(
            f"host memory: the tables ask for {fixed / GB:,.0f} GB (hicache_size_gb and hicache_ratio "
            f"of each rank, capacity_bytes), and {max(0, machine.memory_bytes - reserve) / GB:,.0f} of "
            f"{machine.memory_bytes / GB:,.0f} GB can be given: lower them"
        )
    free = [worker for worker in workers if given[worker.name] is None]
    open_pools = [pool for pool in pools if pool.capacity_bytes is None]
    wish = {worker.name: _wish(worker, kv_bytes[worker.name], needed_bytes[worker.name]) for worker in free}
    wishes = sum(wish[worker.name] * worker.ranks for worker in free)
    least = sum(_whole_gb(needed_bytes[worker.name]) * worker.ranks for worker in free)
    most_pools = _most_pools(machine, pools, open_pools, left)
    half = max(left // 2, min(least, left * 3 // 4)) if open_pools else left
    for_workers = min(wishes, max(half, left - most_pools))
    hosts = {
        worker.name: given[worker.name] or wish.get(worker.name, 0) * for_workers // max(1, wishes) // GB * GB
        for worker in workers
    }
    left -= sum(hosts[worker.name] * worker.ranks for worker in free)
    each = min(left, most_pools) // len(open_pools) // GIB * GIB if open_pools else 0
    return hosts, {pool.name: each if pool.capacity_bytes is None else pool.capacity_bytes for pool in pools}


def _wish(worker: WorkerNeed, kv_bytes: int, needed_bytes: int) -> int:
    return _whole_gb(max(int(HOST_RATIO[worker.buffer_only] * kv_bytes), needed_bytes))


def _whole_gb(size_bytes: int) -> int:
    return -(-size_bytes // GB) * GB


def _most_pools(
    machine: Machine, pools: Sequence[PoolNeed], open_pools: Sequence[PoolNeed], left: int
) -> int:
    """What open pool nodes can have at most, together."""
    if not open_pools or not any(pool.in_shm for pool in open_pools):
        return left if open_pools else 0
    taken = sum(pool.capacity_bytes or 0 for pool in pools if pool.in_shm)
    room = max(0, int(machine.shm_bytes * _SHM_SHARE) - taken)
    sharing = sum(pool.in_shm for pool in open_pools)
    return min(left, room * len(open_pools) // sharing)
