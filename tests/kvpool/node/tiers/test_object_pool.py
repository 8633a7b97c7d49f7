"""Nodes above one bucket: all of them go, others come, and the pages are there; but none that was voided."""

from __future__ import annotations

import queue
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.core.events import Event, ForgetSpace, OpenSpace, PagesFound
from pdserve.kvpool.core.tiering.coordinator import facts_of
from pdserve.kvpool.namespaces.catalog import Namespaces
from pdserve.kvpool.node.config import PoolNodeConfig, TierConfig
from pdserve.kvpool.node.tiers.node_tiers import NodeTiers
from pdserve.kvpool.protocol.cluster_messages import NamespaceRecord
from pdserve.kvpool.tiers.base import TierPage
from tests.support.kvpool.node_processes import NodeProcess, client_of, pool_of
from tests.support.kvpool.object_tiers import Node
from tests.support.kvpool.tier_tools import KIB, contents, key, memory
from tests.support.waiting import until

PAGE = 60 * KIB
WAIT_S = 20.0
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


def test_what_is_voided_as_a_node_joins_its_pool_is_not_found_in_the_bucket_by_its_start(
    tmp_path: Path,
) -> None:
    options = {"url": f"file://{tmp_path}/bucket", "segment_bytes": "1MiB", "spool_bytes": "8MiB"}
    tier = TierConfig(kind="object", path=tmp_path / "spool", capacity_bytes=64 << 20, options=options)
    namespaces = Namespaces(1)
    record = NamespaceRecord("chat@1", 1, 1, {"kv_dtype": "bfloat16"})
    namespaces.registry.learn(record)
    opened = namespaces.add(record)
    other = Node(tmp_path / "other", f"file://{tmp_path}/bucket")
    other.open(known=(opened.space,), facts=lambda space: facts_of(opened))
    other.put(1, 2, 3, space=opened.space)
    other.until_uploaded()
    other.tier.close()
    events = queue.Queue[Event]()
    tiers = NodeTiers(PoolNodeConfig(name="n0", tiers=[tier]), memory(1), namespaces)
    space = namespaces.clear(opened.number)
    for action in (ForgetSpace(opened.space), OpenSpace(space, facts_of(opened))):
        tiers.acts()[type(action)](action)
    tiers.start(events.put)
    try:
        found = list(iter(lambda: next_of(events), None))
        assert {page.space for pages in found for page in pages} == {opened.space}
        until(lambda: not list(tmp_path.glob("bucket/pages/*/*.seg")), "the bucket has voided pages")
    finally:
        tiers.stop()


def next_of(events: queue.Queue[Event]) -> tuple[TierPage, ...] | None:
    """The next pages that the scan found; None: it found no more."""
    while not isinstance(event := events.get(timeout=WAIT_S), PagesFound):
        pass
    return None if event.last else event.pages
