"""Several real nodes in one process that know each other as a test tells them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.node.config import PoolNodeConfig
from pdserve.kvpool.node.node import PoolNode
from pdserve.kvpool.node.peers.gossip import Gossiper
from pdserve.kvpool.protocol.cluster_messages import ClusterState
from pdserve.kvpool.transports.base import Connection
from tests.support.kvpool.connectors import connect
from tests.support.kvpool.local_node import LocalNode
from tests.support.kvpool.nodes import get, open_namespace, put
from tests.support.waiting import until


class Client(NamedTuple):
    """A plain client of one node."""

    connection: Connection
    namespace: int

    def put(self, keys: list[bytes]) -> list[bytes]:
        return put(self.connection, self.namespace, keys)

    def get(self, keys: list[bytes]) -> list[bytes]:
        return get(self.connection, self.namespace, keys)


class Nodes:
    """Nodes by name. What they know of each other is exchanged by hand."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.directory = directory
        self.options = options
        self._locals: dict[str, LocalNode] = {}

    @property
    def nodes(self) -> dict[str, PoolNode]:
        return {name: one.node for name, one in self._locals.items()}

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        """Call in the thread of this node's loop."""
        return self._locals[name].run(work)

    def start(self, name: str, *, join: bool = True, **options: Any) -> PoolNode:
        settings = {"capacity_bytes": 32 << 20, "arena_dir": self.directory, **self.options, **options}
        started = self._locals[name] = LocalNode(PoolNodeConfig(name=name, **settings), self.directory)
        if join:
            self.tell()
        return started.node

    def tell(self) -> None:
        """Let everybody know what anybody knows."""

        def hear(gossip: Gossiper, states: list[ClusterState]) -> None:
            for state in states:
                gossip.apply(gossip.cluster.receive(state))

        for _ in range(3):
            states = [node.gossip.cluster.whole for node in self.nodes.values()]
            for name, node in self.nodes.items():
                self.run(name, partial(hear, node.gossip, states))

    def settle(self) -> None:
        """Wait until nothing moves any more and foreign pages are gone."""

        def done() -> bool:
            self.tell()
            return all(
                node.gossip.cluster.settled and node.state.sharding.ownership.next_step_s == float("inf")
                for node in self.nodes.values()
            )

        until(done, "all nodes have settled")

    def stop(self, name: str) -> None:
        self._locals.pop(name).close()

    def close(self) -> None:
        for name, node in self.nodes.items():
            self.run(name, node.state.check)
            self.stop(name)

    # --- looking

    def ring(self) -> Ring:
        node = next(iter(self.nodes.values()))
        return Ring(node.gossip.view.nodes, node.gossip.view.epoch)

    def counters(self, name: str) -> dict[str, int]:
        return self.run(name, lambda: self.nodes[name].state.status(0, 0.0).counters)

    def holders(self, key: bytes) -> list[str]:
        return [name for name, node in self.nodes.items() if node.state.store.find(1, key) >= 0]

    def owners(self, key: bytes) -> list[str]:
        """Those that hold the page, and not as a replica."""
        states = {name: self.nodes[name].state for name in self.holders(key)}
        return [n for n, one in states.items() if one.store.find(1, key) not in one.sharding.replicas]

    @contextmanager
    def client(self, name: str) -> Iterator[Client]:
        connection = connect(f"unix:{self.directory}/{name}.sock", time.monotonic() + 5)
        try:
            yield Client(connection, open_namespace(connection, "ns", a="b"))
        finally:
            connection.close()
