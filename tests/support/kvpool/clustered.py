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
from pdserve.kvpool.node.config import ClusterConfig, PoolNodeConfig
from pdserve.kvpool.node.node import PoolNode
from pdserve.kvpool.protocol.cluster_messages import ACTIVE
from tests.support.kvpool.connectors import fetch_status
from tests.support.kvpool.nodes import small_config
from tests.support.kvpool.pools import ProcessPool, remove_arena
from tests.support.waiting import SOON_S, soon, until_in_loop

QUIET = {"ping_timeout_s": 200.0}
"""Of nodes that do not ask each other by themselves within a test."""


class Pool:
    """Nodes that know the first one's address; `make` starts one in a directory: a LocalNode or a process."""

    def __init__(self, directory: Path, make: Callable[[PoolNodeConfig, Path], Any]) -> None:
        self.directory = directory
        self.nodes: dict[str, Any] = {}
        self._make = make

    def start(self, *names: str, **options: Any) -> None:
        cluster = ClusterConfig(peers=[f"unix:{self.directory}/a.sock"], **options)
        configs = [small_config(name=name, cluster=cluster) for name in names]
        with ThreadPoolExecutor(len(names)) as pool:
            for node in pool.map(lambda config: self._make(config, self.directory), configs):
                self.nodes[node.config.name] = node

    def view(self, of: str) -> tuple[int, str]:
        report = fetch_status(self.nodes[of].address, soon())
        return report.epoch, "".join(x.node for x in report.members if x.status == ACTIVE)

    def until(self, wanted: str, *, at: str = "", seconds: float = SOON_S) -> None:
        """Wait until all (or those nodes) have this view."""
        deadline = soon(seconds)
        while True:
            views = {name: self.view(name) for name in at or wanted}
            if {ring for _, ring in views.values()} == {wanted} and len({e for e, _ in views.values()}) == 1:
                return
            assert time.monotonic() < deadline, views
            time.sleep(0.02)  # between looks

    def close(self) -> None:
        for node in self.nodes.values():
            node.kill()
            remove_arena(node.config)
            node.close()


def process(config: PoolNodeConfig, directory: Path) -> ProcessPool:
    return ProcessPool(config, directory, "shm")


@contextlib.asynccontextmanager
async def running(tmp_path: Path, name: str, peers: str = "", **options: Any) -> AsyncIterator[PoolNode]:
    """A node that serves; its peers by name."""
    node = PoolNode(config_of(tmp_path, name, peers, **options))
    serving = asyncio.ensure_future(node.serve())
    try:
        await until_in_loop(lambda: serving.done() or node.gossip._detector is not None)
        if serving.done():
            await serving
        yield node
    finally:
        node.stop()
        with contextlib.suppress(PdserveError):
            await serving


def config_of(tmp_path: Path, name: str, peers: str = "", **options: Any) -> PoolNodeConfig:
    addresses = [f"unix:{tmp_path}/{peer}.sock" for peer in peers]
    cluster = ClusterConfig(**{"peers": addresses, **options.pop("cluster", {})})
    listen = options.pop("listen", [f"unix:{tmp_path}/{name}.sock"])
    return small_config(
        name=name, arena_dir=tmp_path / "arenas", listen=listen, keep=False, cluster=cluster, **options
    )


def ring(node: PoolNode) -> str:
    return "".join(n.node for n in node.gossip.view.nodes)


def status_of(node: PoolNode, other: str) -> int:
    return node.gossip.cluster.members[other].status
