"""Pools of real nodes above one bucket: all of them go, others come, and the pages are there."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.kvpool.client.client import PoolClient
from tests.support.kvpool.node_processes import NodeProcess, client_of, pool_of
from tests.support.kvpool.object_tiers import BUCKET, CREDENTIALS, moto_bucket
from tests.support.kvpool.tier_tools import KIB, contents, key

PAGE = 60 * KIB
COUNT = 48
MIB = KIB * KIB
KEYS = [key(n) for n in range(COUNT)]


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in CREDENTIALS.items():
        monkeypatch.setenv(variable, value)


def settings_of(directory: Path, endpoint: str, **options: Any) -> Callable[[str], dict[str, Any]]:
    """Of each node, by name."""

    def of(name: str) -> dict[str, Any]:
        given = {
            "url": f"s3://{BUCKET}/pool",
            "endpoint": endpoint,
            "segment_bytes": "1MiB",
            "spool_bytes": "8MiB",
            "flush_s": 0.1,
            "refresh_s": 0.3,
            "read_timeout_s": 1.0,
            **options,
        }
        tier = {"kind": "object", "path": str(directory / name), "capacity_bytes": 64 << 20, "write": "all"}
        return {"tiers": [{**tier, "options": given}]}

    return of


COMMON = {
    "capacity_bytes": 8 * MIB,
    "promotion_timeout_s": 5.0,
    "keep": False,
}


def client(nodes: list[NodeProcess], namespace: str = "chat@1") -> PoolClient:
    config = client_of(nodes, get_timeout_s=20.0, put_timeout_s=20.0)
    return PoolClient(config, namespace, {"kv_dtype": "bfloat16"}, name="test")


def hits(pool: PoolClient) -> int:
    """How many of the pages are there, each byte for byte."""
    into = [np.zeros(PAGE, np.uint8) for _ in KEYS]
    found = pool.get(KEYS, [(data,) for data in into])
    for n, (ok, data) in enumerate(zip(found, into, strict=True)):
        assert not ok or np.array_equal(data, contents(n, PAGE)), "wrong bytes"
    return sum(found)


def until(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


def fill(nodes: list[NodeProcess], directory: Path) -> None:
    with closing(client(nodes)) as pool:
        assert all(pool.put(KEYS, [(contents(n, PAGE),) for n in range(COUNT)]))
        until(lambda: sum(node.status().tiers[0].counters["stored"] for node in nodes) >= COUNT, "not stored")
        until(lambda: not list(directory.glob("*/*.seg")), "not uploaded")


@pytest.mark.usefixtures("credentials")
def test_a_pool_of_other_nodes_without_disks_has_all_pages(tmp_path: Path) -> None:
    with moto_bucket() as endpoint:
        first, second = tmp_path / "first", tmp_path / "second"
        for directory in (first, second):
            directory.mkdir()
        with pool_of(2, first, COMMON, own_settings=settings_of(first, endpoint)) as nodes:
            fill(nodes, first)
        with (
            pool_of(3, second, COMMON, own_settings=settings_of(second, endpoint)) as nodes,
            closing(client(nodes)) as pool,
        ):
            until(lambda: all(pool.exists(KEYS)), "not found")
            until(lambda: hits(pool) == COUNT, "not read")  # a page that comes late is kept for the next read
            assert sum(node.status().tiers[0].counters["stored"] for node in nodes) == 0, "stored twice"
