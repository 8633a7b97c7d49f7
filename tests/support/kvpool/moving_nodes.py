"""Several real nodes in one process: real sockets, arenas and threads, one event loop in its own thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pdserve.errors import PoolError
from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.kvpool.node.node import PoolNode
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.transports.base import OK, Connection
from tests.support.kvpool.connectors import connect

PAGE_BYTES = 24 * 1024
DEADLINE_S = 20.0


def page_of(key: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes that belong to a key: so a reader knows what is right."""
    return np.frombuffer((key * (PAGE_BYTES // 32 + 1))[:PAGE_BYTES], np.uint8)


def some_keys(count: int, seed: int = 1) -> list[bytes]:
    rng = np.random.default_rng(seed)
    return [rng.bytes(32) for _ in range(count)]


def wait_for(what: Callable[[], bool], said: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {said}"
        time.sleep(0.01)  # between looks


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

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(DEADLINE_S)

    def start(self, name: str, *, join: bool = True, **options: Any) -> PoolNode:
        sizes = {
            "capacity_bytes": "32MiB",
            "slab_bytes": "1MiB",
            "min_slot_bytes": "8KiB",
            "quarantine_s": 0.2,
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
        wait_for(lambda: (self.directory / f"{name}.sock").exists(), f"{name} listens")
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

    def declare_dead(self, name: str) -> None:
        def declare() -> None:
            for node in self.nodes.values():
                version = node.gossip.cluster.members[name].version
                node.gossip.apply(node.gossip.cluster.declare_dead(name, version))

        self.run(declare)
        self.tell()

    def settle(self) -> None:
        """Wait until nothing moves any more and foreign pages are gone."""

        def done() -> bool:
            self.tell()
            return all(
                node.gossip.cluster.settled and node.state.sharding.ownership.next_step_s == float("inf")
                for node in self.nodes.values()
            )

        wait_for(done, "all nodes have settled")

    def stop(self, name: str) -> None:
        self.run(self.nodes[name].stop)
        self.wait_ended(name)

    def wait_ended(self, name: str) -> None:
        del self.nodes[name]
        serving = self._serving.pop(name)

        async def ended() -> None:
            await asyncio.wait_for(serving, DEADLINE_S)

        self.run(ended)

    def close(self) -> None:
        for name, node in list(self.nodes.items()):
            self.run(node.state.check)
            self.stop(name)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)

    # --- looking

    def ring(self) -> Ring:
        node = next(iter(self.nodes.values()))
        return Ring(node.gossip.view.nodes, node.gossip.view.epoch)

    def counters(self, name: str) -> dict[str, int]:
        return self.run(
            lambda: {
                **self.nodes[name].state.status(0, 0.0).counters,
                **self.nodes[name]._moved(),
            }
        )

    def holders(self, key: bytes) -> list[str]:
        return [name for name, node in self.nodes.items() if node.state.store.find(1, key) >= 0]

    @contextmanager
    def client(self, name: str) -> Iterator[Client]:
        connection = connect(f"unix:{self.directory}/{name}.sock", time.monotonic() + 5)
        try:
            yield Client(connection)
        finally:
            connection.close()


class Client:
    """A plain client of one node."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        reply = connection.call(m.OpenNamespace(1, "ns", {"a": "b"}), time.monotonic() + 5)
        assert isinstance(reply, m.Opened)
        self.namespace = reply.namespace

    def put(self, keys: Sequence[bytes]) -> list[int]:
        """The status of each; what was granted is written."""
        statuses = []
        for start in range(0, len(keys), 32):
            some = list(keys[start : start + 32])
            deadline = time.monotonic() + 5
            reserved = self.connection.call(m.Reserve(2, self.namespace, some, [PAGE_BYTES]), deadline)
            assert isinstance(reserved, m.Reserved)
            granted = [(k, g) for k, g in zip(some, reserved.grants, strict=True) if g.status == m.GRANTED]
            grants = [grant for _, grant in granted]
            sums = self.connection.write_pages(grants, [[page_of(k)] for k, _ in granted], deadline)
            commit = m.Commit(3, [g.slot for g in grants], [g.sequence for g in grants], sums)
            committed = self.connection.call(commit, deadline)
            assert isinstance(committed, m.Committed)
            assert all(committed.mask)
            statuses += [grant.status for grant in reserved.grants]
        return statuses

    def get(self, keys: Sequence[bytes]) -> list[bytes]:
        """The keys found. Fails when any delivered page has wrong bytes."""
        found = []
        for start in range(0, len(keys), 64):
            some, deadline = list(keys[start : start + 64]), time.monotonic() + 5
            pins = self.pins(some)
            hits = [(k, p) for k, p in zip(some, pins, strict=True) if p.status == m.HIT]
            pages = [[np.zeros(PAGE_BYTES, np.uint8)] for _ in hits]
            outcomes = self.connection.read_pages([p for _, p in hits], pages, deadline)
            for (key, _), outcome, [page] in zip(hits, outcomes, pages, strict=True):
                assert outcome != OK or np.array_equal(page, page_of(key))
            self.release([p for _, p in hits])
            found += [k for (k, _), outcome in zip(hits, outcomes, strict=True) if outcome == OK]
        return found

    def pins(self, keys: Sequence[bytes]) -> list[m.Pin]:
        request = m.Get(4, self.namespace, list(keys), [PAGE_BYTES])
        got = self.connection.call(request, time.monotonic() + 5)
        assert isinstance(got, m.Got)
        return got.pins

    def release(self, pins: Sequence[m.Pin]) -> None:
        self.connection.post(m.Release([p.slot for p in pins], [p.sequence for p in pins]))


class Reader:
    """Reads keys by the view, as clients do: at the owner, else at the previous owner, until stopped.

    `misses` counts keys found at neither. `errors` are those of nodes that went.
    """

    def __init__(self, nodes: Nodes, keys: Sequence[bytes]) -> None:
        self.reads = self.misses = self.errors = 0
        self._nodes = nodes
        self._keys = list(keys)
        self._stopping = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(DEADLINE_S)
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        clients: dict[str, Client] = {}
        rng = np.random.default_rng(3)
        try:
            while not self._stopping.is_set():
                some = [self._keys[i] for i in rng.integers(0, len(self._keys), 32)]
                self._read(some, clients)
        except BaseException as error:  # boundary: this thread; `stop` raises it
            self.failure = error
        finally:
            for client in clients.values():
                client.connection.close()

    def _read(self, keys: list[bytes], clients: dict[str, Client]) -> None:
        view = next(iter(list(self._nodes.nodes.values()))).gossip.view
        missing = set(keys)
        for nodes in (view.nodes, view.previous, view.nodes):
            if missing and nodes:
                missing -= self._read_by(Ring(nodes), sorted(missing), clients)
        self.reads += len(set(keys))
        self.misses += len(missing)

    def _read_by(self, ring: Ring, keys: list[bytes], clients: dict[str, Client]) -> set[bytes]:
        found: set[bytes] = set()
        for name, places in ring.split(keys).items():
            try:
                if name not in clients:
                    address = f"unix:{self._nodes.directory}/{name}.sock"
                    clients[name] = Client(connect(address, time.monotonic() + 5))
                found.update(clients[name].get([keys[i] for i in places]))
            except PoolError:
                self.errors += 1
                if name in clients:
                    clients.pop(name).connection.close()
        return found
