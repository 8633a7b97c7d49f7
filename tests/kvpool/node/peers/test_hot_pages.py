"""Hot pages on three real nodes: replicas come, reads spread, replicas go, and outlive their owner."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pdserve.kvpool.core.sharding import coordinator
from pdserve.kvpool.node.config.cluster import ReplicasConfig
from pdserve.kvpool.protocol import messages as m
from tests.support.kvpool.moving_nodes import PAGE_BYTES, Client, Nodes, some_keys, wait_for

NAMES = ("n0", "n1", "n2")
REPLICAS = ReplicasConfig(hot_reads_s=15.0, half_life_s=0.3, lease_s=1.0)
SMALL_SHARE = 3 * PAGE_BYTES / (32 << 20)


@pytest.fixture
def replicas() -> ReplicasConfig:
    return REPLICAS


@pytest.fixture
def nodes(tmp_path: Path, replicas: ReplicasConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """They look at heat and leases ten times a second."""
    monkeypatch.setattr(coordinator, "ADVANCE_S", 0.1)
    found = Nodes(tmp_path, replicas=replicas)
    for name in NAMES:
        found.start(name)
    found.settle()
    yield found
    found.close()


class SpreadingReader:
    """Reads as clients do: at the owner first, then at the owner or one of the replicas that it named."""

    def __init__(self, nodes: Nodes, clients: dict[str, Client]) -> None:
        self.reads: Counter[str] = Counter()
        self.missed = 0
        self._ring = nodes.ring()
        self._clients = clients
        self._replicas: dict[bytes, int] = {}
        self._random = np.random.default_rng(5)

    def read(self, key: bytes) -> None:
        chain = [node.node for node in self._ring.successors(key, 1 + self._replicas.get(key, 0))]
        name = chain[int(self._random.integers(len(chain)))]
        client = self._clients[name]
        [pin] = client.pins([key])
        self.reads[name] += 1
        if pin.status == m.HIT:
            client.release([pin])
            if name == chain[0]:
                self._replicas[key] = pin.replicas
        else:
            self.missed += 1
            self._replicas.pop(key, None)


def fill(nodes: Nodes, clients: dict[str, Client], keys: list[bytes]) -> None:
    for name, places in nodes.ring().split(keys).items():
        assert set(clients[name].put([keys[i] for i in places])) == {m.GRANTED}


@pytest.fixture
def clients(nodes: Nodes) -> Iterator[dict[str, Client]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(nodes.client(name)) for name in NAMES}


def hot_ones(nodes: Nodes, keys: list[bytes], owner: str, count: int) -> list[bytes]:
    return [key for key in keys if nodes.ring().owner(key).node == owner][:count]


def read_until_replicated(nodes: Nodes, reader: SpreadingReader, hot: list[bytes]) -> None:
    def everywhere() -> bool:
        for key in hot:
            for _ in range(5):
                reader.read(key)
        return all(len(nodes.holders(key)) == len(NAMES) for key in hot)

    wait_for(everywhere, "hot pages have replicas on both other nodes")


def test_reads_of_a_hot_prefix_spread_over_all_nodes(nodes: Nodes, clients: dict[str, Client]) -> None:
    keys = some_keys(120)
    fill(nodes, clients, keys)
    hot = hot_ones(nodes, keys, "n0", 4)
    reader = SpreadingReader(nodes, clients)
    read_until_replicated(nodes, reader, hot)
    reader.reads.clear()
    reader.missed = 0
    for key in hot * 200:
        reader.read(key)
    assert reader.missed == 0
    assert max(reader.reads.values()) / sum(reader.reads.values()) < 0.5
    with nodes.client("n1") as client:
        assert set(client.get(hot)) == set(hot), "replicas hold the page's bytes"
    cold = [key for key in keys if key not in hot]
    assert all(len(nodes.holders(key)) == 1 for key in cold)


def test_replicas_end_when_the_heat_does(nodes: Nodes, clients: dict[str, Client]) -> None:
    keys = some_keys(60, seed=2)
    fill(nodes, clients, keys)
    hot = hot_ones(nodes, keys, "n1", 2)
    read_until_replicated(nodes, SpreadingReader(nodes, clients), hot)
    assert nodes.counters("n1")["hot_pages"] == 2
    wait_for(lambda: all(nodes.holders(key) == ["n1"] for key in hot), "the replicas are gone")
    assert sum(nodes.counters(name)["replica_bytes"] for name in NAMES) == 0
    assert nodes.counters("n1")["hot_pages"] == 0
    [pin] = clients["n1"].pins(hot[:1])
    assert pin.replicas == 0


def test_hot_pages_outlive_their_node(nodes: Nodes, clients: dict[str, Client]) -> None:
    keys = some_keys(90, seed=3)
    fill(nodes, clients, keys)
    hot = hot_ones(nodes, keys, "n0", 8)
    read_until_replicated(nodes, SpreadingReader(nodes, clients), hot)
    nodes.stop("n0")
    nodes.declare_dead("n0")
    ring = nodes.ring()
    assert all(len(clients[ring.owner(key).node].get([key])) == 1 for key in hot), "0 lost"
    nodes.settle()
    # longer than a replica's lease: what became the owner's page stays
    time.sleep(REPLICAS.lease_s + 0.5)  # time is what this test is about
    assert all(ring.owner(key).node in nodes.holders(key) for key in hot)
    lost = [key for key in keys if not nodes.holders(key)]
    assert not set(lost) & set(hot)
    assert sum(nodes.counters(name)["replicas"] for name in ("n1", "n2")) == 0


def test_a_successor_that_hangs_delays_nobody(nodes: Nodes, clients: dict[str, Client]) -> None:
    keys = some_keys(60, seed=4)
    fill(nodes, clients, keys)
    [hot] = hot_ones(nodes, keys, "n2", 1)
    first, second = (node.node for node in nodes.ring().successors(hot, 3)[1:])
    stuck = nodes.nodes[first]
    nodes.run(lambda: setattr(stuck, "received", lambda connection, message: None))
    reader = SpreadingReader(nodes, clients)

    def at_second() -> bool:
        for _ in range(10):
            reader.read(hot)
        return second in nodes.holders(hot)

    wait_for(at_second, "the other successor has a replica")
    [pin] = clients["n2"].pins([hot])
    assert pin.replicas == 0, "readers go by the order of the ring: the first does not hold it"
    nodes.run(lambda: delattr(stuck, "received"))


@pytest.mark.parametrize(
    "replicas", [msgspec.structs.replace(REPLICAS, max_share=SMALL_SHARE)], ids=["small"]
)
def test_replicas_take_no_more_than_their_share_of_a_node(nodes: Nodes, clients: dict[str, Client]) -> None:
    keys = some_keys(60, seed=6)
    fill(nodes, clients, keys)
    hot = hot_ones(nodes, keys, "n0", 8)
    reader = SpreadingReader(nodes, clients)

    def some_are() -> bool:
        for key in hot:
            reader.read(key)
        return sum(len(nodes.holders(key)) > 1 for key in hot) >= 2

    wait_for(some_are, "some have replicas")
    for name in NAMES:
        assert nodes.counters(name)["replica_bytes"] <= 3 * PAGE_BYTES
