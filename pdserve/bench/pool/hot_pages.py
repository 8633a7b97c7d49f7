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

from pdserve.bench.node_processes import NodeProcess, pool_of
from pdserve.bench.pool.load_process import CONNECT_TIMEOUT_S, Board, DriverConfig, driving, fill, make_keys
from pdserve.bench.stores import BenchError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.protocol.base import NodeAddress
from pdserve.kvpool.protocol.messages import DataPathChoice

NAMESPACE: Final = "hot"
GEOMETRY: Final = {"hot": "1"}
CANDIDATES: Final = 4096


class Hot(msgspec.Struct, frozen=True):
    """One run. Shares are of the reads served; rates in pages and 10^9 bytes per second."""

    replicas: int
    path: str
    nodes: int
    readers: int
    prefix_pages: int
    page_bytes: int
    reads: dict[str, int]  # by node
    busiest_share: float
    pages_s: float
    gbps: float
    missed: int


def hot(
    replicas: int,
    *,
    path: DataPathChoice,
    nodes: int,
    readers: int,
    prefix_pages: int,
    page_bytes: int,
    warm_up_s: float,
    seconds: float,
    directory: Path,
) -> Hot:
    """Run it in `directory`. Raises BenchError."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = {
        "capacity_bytes": max(128 << 20, 16 * prefix_pages * page_bytes),
        "slab_bytes": max(4 << 20, page_bytes),
        "keep": False,
        "replicas": {"max_replicas": replicas},
    }
    with pool_of(nodes, directory, settings) as processes:
        refs = [PoolNodeRef(node=node.name, address=node.address) for node in processes]
        config = PoolClientConfig(nodes=refs, data_path=path, connect_timeout_s=CONNECT_TIMEOUT_S)
        with closing(PoolClient(config, NAMESPACE, GEOMETRY, name="hot")) as client:
            keys = _of_one_node(processes, prefix_pages)
            fill(client, keys, page_bytes)
        board = Board(directory / "board", readers)
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
                batch=prefix_pages,
            )
            for index in range(readers)
        ]
        with driving(drivers, directory):
            board.go(True)
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
        replicas=replicas,
        path=path,
        nodes=nodes,
        readers=readers,
        prefix_pages=prefix_pages,
        page_bytes=page_bytes,
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
