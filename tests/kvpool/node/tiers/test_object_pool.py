"""Pools of real nodes above one bucket: all of them go, others come, and the pages are there."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from pdserve.kvpool.client.client import PoolClient
from tests.support.kvpool.node_processes import NodeProcess, client_of, pool_of
from tests.support.kvpool.tier_tools import KIB, contents, key
from tests.support.waiting import until

PAGE = 60 * KIB
KEYS = [key(n) for n in range(48)]
SETTINGS = {"capacity_bytes": "8MiB", "promotion_timeout_s": 5.0, "keep": False}


def client(nodes: list[NodeProcess]) -> PoolClient:
    config = client_of(nodes, get_timeout_s=20.0, put_timeout_s=20.0)
    return PoolClient(config, "chat@1", {"kv_dtype": "bfloat16"}, name="test")


def hits(pool: PoolClient) -> int:
    """How many of the pages are there, each byte for byte."""
    into = [np.zeros(PAGE, np.uint8) for _ in KEYS]
    found = pool.get(KEYS, [(data,) for data in into])
    for n, (ok, data) in enumerate(zip(found, into, strict=True)):
        assert not ok or np.array_equal(data, contents(n, PAGE)), "wrong bytes"
    return sum(found)


def stored(nodes: list[NodeProcess]) -> int:
    return sum(node.status().tiers[0].counters["stored"] for node in nodes)


def test_a_pool_of_other_nodes_without_disks_has_all_pages(tmp_path: Path) -> None:
    options = {"url": f"file://{tmp_path}/bucket", "segment_bytes": "1MiB", "spool_bytes": "8MiB"}
    options |= {"flush_s": 0.1, "refresh_s": 0.3}

    def tiers(name: str) -> dict[str, Any]:
        tier = {"kind": "object", "path": str(tmp_path / "spool" / name), "capacity_bytes": "64MiB"}
        return {"tiers": [{**tier, "write": "all", "options": options}]}

    with pool_of(2, tmp_path, SETTINGS, own_settings=tiers) as nodes, closing(client(nodes)) as pool:
        assert all(pool.put(KEYS, [(contents(n, PAGE),) for n in range(len(KEYS))]))
        until(lambda: stored(nodes) >= len(KEYS), "not stored")
        until(lambda: not list(tmp_path.glob("spool/*/*.seg")), "not uploaded")
    (tmp_path / "spool").rename(tmp_path / "lost")
    with pool_of(3, tmp_path, SETTINGS, own_settings=tiers) as nodes, closing(client(nodes)) as pool:
        until(lambda: all(pool.exists(KEYS)), "not found")
        until(lambda: hits(pool) == len(KEYS), "not read")  # a page that comes late is kept for the next read
        assert stored(nodes) == 0, "stored twice"
