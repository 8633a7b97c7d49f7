"""Pages that were pushed out of memory come back from a tier, whatever the transport."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pdserve.kvpool.node.config.node import TierConfig
from pdserve.kvpool.transports.base import OK
from tests.support.kvpool.pools import KIB, Pool
from tests.support.kvpool.raw_client import client, eventually, keys, pages_of, same

MakePool = Callable[..., Pool]


def test_pages_pushed_out_of_memory_come_back_from_a_tier(make_pool: MakePool, tmp_path: Path) -> None:
    ssd = TierConfig(
        kind="ssd",
        path=tmp_path / "ssd",
        capacity_bytes=64 * KIB * KIB,
        write="all",
        options={"segment_bytes": 8 * KIB * KIB},
    )
    pool = make_pool(tiers=[ssd], promotion_timeout_s=4.0)
    with client(pool, "sinking") as c:
        first = keys(8)
        pages = pages_of(c.layout, 8, seed=31)
        c.put(first, pages)
        eventually(lambda: c.status().tiers[0].pages == 8, "the pages are not in the tier")
        seed = 100
        while c.status().counters["evictions"] < 16:
            seed += 1
            c.put(keys(8), pages_of(c.layout, 8, seed=seed))
        assert c.exists(first) == [1] * 8
        outcomes, got = c.get(first)
        assert outcomes == [OK] * 8
        assert all(same(a, b) for a, b in zip(got, pages, strict=True))
        assert c.status().counters["promoted"] > 0
