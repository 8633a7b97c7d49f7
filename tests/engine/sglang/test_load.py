from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from pdserve.engine.sglang.load import load_of
from pdserve.router.fleet.worker import WorkerLoad


def manager(*ranks: dict[str, int]) -> Any:
    snapshots = [SimpleNamespace(**rank) for rank in ranks]
    return SimpleNamespace(load_snapshot_reader=SimpleNamespace(read_all=lambda: snapshots))


def rank(running: int, waiting: int, queued: int, used: int, total: int) -> dict[str, int]:
    return {
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_waiting_uncached_tokens": queued,
        "num_used_tokens": used,
        "max_total_num_tokens": total,
    }


def test_the_load_of_all_ranks_is_what_the_router_reads() -> None:
    load = load_of(manager(rank(1, 2, 300, 40, 1000), rank(3, 0, 0, 1100, 1000)))
    assert msgspec.convert(load, WorkerLoad) == WorkerLoad(4, 2, 300, 960)


def test_no_snapshot_is_no_load() -> None:
    assert load_of(manager()) is None
