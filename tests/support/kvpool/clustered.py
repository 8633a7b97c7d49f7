"""Several nodes that know each other: as processes, and in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pdserve.errors import PdserveError
from pdserve.kvpool.admin.node_client import fetch_status
from pdserve.kvpool.node.config.cluster import ClusterConfig
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.kvpool.node.node import PoolNode
from pdserve.kvpool.protocol.cluster_messages import (
    ACTIVE,
)
from tests.support.kvpool.nodes import small_config, soon
from tests.support.kvpool.pools import ProcessPool, remove_arena
from tests.support.kvpool.processor import Stopwatch

DETECTED_S = 2.0  # R10


QUICK = {
    "ping_interval_s": 0.05,
    "ping_timeout_s": 1.0,  # all nodes of a test share a process, and that a busy machine
    "indirect_timeout_s": 0.3,
    "sync_interval_s": 0.1,
    "join_timeout_s": 1.0,
}


class Processes:
    """Nodes that know the first one's address."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.nodes: dict[str, ProcessPool] = {}

    def start(self, *names: str, **options: Any) -> None:
        cluster = ClusterConfig(peers=[f"unix:{self.directory}/a.sock"], **options)
        configs = [small_config(name=name, cluster=cluster) for name in names]
        with ThreadPoolExecutor(len(names)) as pool:
            for node in pool.map(lambda config: ProcessPool(config, self.directory, "shm"), configs):
                self.nodes[node.config.name] = node

    def view(self, of: str) -> tuple[int, str]:
        report = fetch_status(self.nodes[of].address, soon())
        return report.epoch, "".join(x.node for x in report.members if x.status == ACTIVE)

    def until(self, wanted: str, *, at: str = "", seconds: float = 10.0) -> float:
        """How long it took for all (or those nodes) to have this view, while they had a processor."""
        since = self.stopwatch(at or wanted)
        while True:
            views = {name: self.view(name) for name in at or wanted}
            if {ring for _, ring in views.values()} == {wanted} and len({e for e, _ in views.values()}) == 1:
                return since.passed_s()
            assert since.passed_s() < seconds, views
            time.sleep(0.02)

    def stopwatch(self, names: str) -> Stopwatch:
        """For what these nodes do."""
        return Stopwatch(*(self.nodes[name].pid for name in names))

    def close(self) -> None:
        for node in self.nodes.values():
            node.kill()
            remove_arena(node.config)


@contextlib.asynccontextmanager
async def running(tmp_path: Path, name: str, peers: str = "", **options: Any) -> AsyncIterator[PoolNode]:
    """A node that serves; its peers by name."""
    node = PoolNode(config_of(tmp_path, name, peers, **options))
    serving = asyncio.ensure_future(node.serve())
    try:
        await until(lambda: serving.done() or node.gossip._detector is not None)
        if serving.done():
            await serving
        yield node
    finally:
        node.stop()
        with contextlib.suppress(PdserveError):
            await serving


def config_of(tmp_path: Path, name: str, peers: str = "", **options: Any) -> PoolNodeConfig:
    addresses = [f"unix:{tmp_path}/{peer}.sock" for peer in peers]
    cluster = ClusterConfig(**{**QUICK, "peers": addresses, **options.pop("cluster", {})})
    listen = options.pop("listen", [f"unix:{tmp_path}/{name}.sock"])
    return small_config(
        name=name, arena_dir=tmp_path / "arenas", listen=listen, keep=False, cluster=cluster, **options
    )


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    since = Stopwatch()
    while not condition():
        assert since.passed_s() < seconds
        await asyncio.sleep(0.01)


def ring(node: PoolNode) -> str:
    return "".join(n.node for n in node.gossip.view.nodes)


def status_of(node: PoolNode, other: str) -> int:
    return node.gossip.cluster.members[other].status
