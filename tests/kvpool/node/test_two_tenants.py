"""Two tenants on real nodes: one fills the pool, and the other still finds what it finds alone."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.kvpool.client.client import PoolClient
from tests.support.command import pdserve_here
from tests.support.kvpool.node_processes import NodeProcess, client_of, pool_of
from tests.support.kvpool.tier_tools import KIB, contents, key

PAGE, MIB = 60 * KIB, KIB * KIB
MEMORY_BYTES = 8 * MIB
"""Of each of two nodes: 256 pages in all."""
SESSIONS, PAGES, TURNS = 12, 4, 60
"""Of the tenant whose hits are counted: 48 pages, and another 48 copies at its own node at most."""
FLOOD = 16
"""Pages that the other one stores after each of these turns: all memory, every 16 turns."""
GEOMETRY = {"kv_dtype": "bfloat16"}


def hits(nodes: list[NodeProcess], model: str, seed: int, *, floods: bool) -> float:
    """The share of its pages that a tenant finds after its first turns, which read and store sessions."""
    rng, wanted, found, fresh = random.Random(seed), 0, 0, 1_000_000
    page: Any = np.empty(PAGE, np.uint8)
    with closing(PoolClient(client_of(nodes), model, GEOMETRY)) as pool:
        for turn in range(SESSIONS + TURNS):
            session = turn if turn < SESSIONS else rng.randrange(SESSIONS)
            numbers = [session * PAGES + n for n in range(PAGES)]
            there = [pool.get([key(n)], [[page]], tenant="calm")[0] for n in numbers]
            if turn >= SESSIONS:
                wanted, found = wanted + PAGES, found + sum(there)
            missing = [n for n, has in zip(numbers, there, strict=True) if not has]
            pool.put([key(n) for n in missing], [[contents(n, PAGE)] for n in missing], "calm")
            if floods:
                new = range(fresh, fresh := fresh + FLOOD)
                pool.put([key(n) for n in new], [[contents(n, PAGE)] for n in new], "loud")
        assert pool.counters.failures == 0
    return found / wanted


@pytest.mark.parametrize("seed", range(2))
def test_a_tenants_hits_stay_while_another_one_fills_the_pool(tmp_path: Path, seed: int) -> None:
    with pool_of(2, tmp_path, {"capacity_bytes": MEMORY_BYTES}) as nodes:

        def of(model: str, *, floods: bool, quota: str = "") -> float:
            settings = [f"tenant_quota_bytes={quota}"] if quota else []
            made = pdserve_here("pool", "ns", "create", nodes[0].address, model, *settings)
            assert made.returncode == 0, made.stderr
            share = hits(nodes, model, seed, floods=floods)
            dropped = pdserve_here("pool", "ns", "drop", nodes[0].address, model)
            assert dropped.returncode == 0, dropped.stderr
            return share

        alone = of("alone@1", floods=False)
        assert alone > 0.99
        assert of("bounded@1", floods=True, quota=f"{MEMORY_BYTES // 2}") >= 0.95 * alone
        assert of("unbounded@1", floods=True) < 0.8 * alone, "the load shows nothing"
