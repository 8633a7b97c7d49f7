"""One hot prefix, three nodes: who serves its reads, with replicas of hot pages and without.

All pages of the prefix belong to one node, which is the worst case: without replicas it serves every read.
Readers are processes that get the whole prefix again and again. A node's share is what its own counters say.
"""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.node_processes import NodeProcess, client_of, pool_of
from benchmarks.pool.load_process import CONNECT_TIMEOUT_S, Board, DriverConfig, driving, fill, make_keys
from benchmarks.stores import BenchError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.protocol.base import NodeAddress
from pdserve.kvpool.protocol.messages import DataPathChoice

NAMESPACE: Final = "hot"
GEOMETRY: Final = {"hot": "1"}
CANDIDATES: Final = 4096


class HotSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. All pages of the prefix have one owner."""

    replicas: int
    path: DataPathChoice
    nodes: int
    readers: int
    prefix_pages: int
    page_bytes: int


class Hot(HotSettings, frozen=True, kw_only=True):
    """One run. Shares are of the reads served; rates in pages and 10^9 bytes per second."""

    reads: dict[str, int]  # by node
    busiest_share: float
    pages_s: float
    gbps: float
    missed: int


def hot(settings: HotSettings, warm_up_s: float, seconds: float, directory: Path) -> Hot:
    """Run it in `directory`. Raises BenchError."""
    page_bytes, batch = settings.page_bytes, settings.prefix_pages
    node_settings = {
        "capacity_bytes": max(128 << 20, 16 * batch * page_bytes),
        "slab_bytes": max(4 << 20, page_bytes),
        "keep": False,
        "replicas": {"max_replicas": settings.replicas},
    }
    with pool_of(settings.nodes, directory, node_settings) as processes:
        config = client_of(processes, settings.path, connect_timeout_s=CONNECT_TIMEOUT_S)
        with closing(PoolClient(config, NAMESPACE, GEOMETRY, name="hot")) as client:
            keys = _of_one_node(processes, batch)
            fill(client, keys, page_bytes)
        board = Board(directory / "board", settings.readers)
        drivers = [
            DriverConfig(
                name=f"reader{index}",
                client=config,
                namespace=NAMESPACE,
                geometry=GEOMETRY,
                board=board.path,
                row=1 + index,
                threads=1,
                keys=keys,
                page_bytes=page_bytes,
                batch=batch,
            )
            for index in range(settings.readers)
        ]
        with driving(drivers, directory):
            board.go(True)
            board.await_work()
            time.sleep(warm_up_s)
            before, reads_before, began = board.totals(), _served(processes), time.monotonic()
            time.sleep(seconds)
            after, reads_after, took_s = board.totals(), _served(processes), time.monotonic() - began
            board.go(False)
    reads = {node: reads_after[node] - reads_before[node] for node in reads_after}
    pages = after["pages"] - before["pages"]
    if not pages or not sum(reads.values()):
        raise BenchError("the readers read nothing: run longer")
    return Hot(
        **msgspec.structs.asdict(settings),
        reads=reads,
        busiest_share=round(max(reads.values()) / sum(reads.values()), 3),
        pages_s=round(pages / took_s, 1),
        gbps=round(pages * page_bytes / took_s / 1e9, 3),
        missed=after["missed"] - before["missed"],
    )


def _of_one_node(nodes: list[NodeProcess], count: int) -> list[bytes]:
    ring = Ring([NodeAddress(node.name, node.address) for node in nodes])
    keys = make_keys("hot", CANDIDATES)
    mine = [keys[place] for place in ring.split(keys)[nodes[0].name]]
    if len(mine) < count:
        raise BenchError(f"a prefix has at most {len(mine)} pages here")
    return mine[:count]


def _served(nodes: list[NodeProcess]) -> dict[str, int]:
    """Pages of the namespace that each node handed out since it started."""
    return {
        node.name: sum(ns.hits for ns in node.status().namespaces if ns.name == NAMESPACE) for node in nodes
    }
