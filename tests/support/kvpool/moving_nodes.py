"""Several real nodes in one process: real sockets, arenas and threads, one event loop in its own thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.kvpool.node.node import PoolNode
from pdserve.kvpool.transports.base import Connection
from tests.support.kvpool.connectors import connect
from tests.support.kvpool.nodes import get, open_namespace, put
from tests.support.waiting import SOON_S, until


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
        self.nodes: dict[str, PoolNode] = {}
        self._serving: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, make: Callable[[], Any]) -> Any:
        """Call in the loop's thread; awaits a coroutine."""

        async def call() -> Any:
            result = make()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(SOON_S)

    def start(self, name: str, *, join: bool = True, **options: Any) -> PoolNode:
        sizes = {
            "capacity_bytes": 32 << 20,
        }
        config = PoolNodeConfig(
            name=name,
            listen=[f"unix:{self.directory}/{name}.sock"],
            arena_dir=self.directory,
            keep=False,
            **(sizes | self.options | options),
        )
        node = self.nodes[name] = PoolNode(config)

        async def serve() -> None:
            self._serving[name] = asyncio.get_running_loop().create_task(node.serve())

        self.run(serve)
        until(lambda: (self.directory / f"{name}.sock").exists(), f"{name} listens")
        if join:
            self.tell()
        return node

    def tell(self) -> None:
        """Let everybody know what anybody knows."""

        def exchange() -> None:
            for _ in range(3):
                states = [node.gossip.cluster.whole for node in self.nodes.values()]
                for node in self.nodes.values():
                    for state in states:
                        node.gossip.apply(node.gossip.cluster.receive(state))

        self.run(exchange)

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
        self.run(self.nodes[name].stop)
        self.wait_ended(name)

    def wait_ended(self, name: str) -> None:
        del self.nodes[name]
        serving = self._serving.pop(name)

        async def ended() -> None:
            await asyncio.wait_for(serving, SOON_S)

        self.run(ended)

    def close(self) -> None:
        for name, node in list(self.nodes.items()):
            self.run(node.state.check)
            self.stop(name)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SOON_S)

    # --- looking

    def ring(self) -> Ring:
        node = next(iter(self.nodes.values()))
        return Ring(node.gossip.view.nodes, node.gossip.view.epoch)

    def counters(self, name: str) -> dict[str, int]:
        return self.run(lambda: self.nodes[name].state.status(0, 0.0).counters)

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
