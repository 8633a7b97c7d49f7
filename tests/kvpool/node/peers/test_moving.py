"""Nodes that hand pages to each other: real nodes, sockets, memory and threads."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import pytest

from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.core.sharding import handover
from pdserve.kvpool.node.config import MovingConfig, NamespaceConfig, TierConfig, UcxConfig
from pdserve.kvpool.node.node import PoolNode
from pdserve.kvpool.node.peers import page_push
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.base import NodeAddress
from pdserve.kvpool.protocol.cluster_messages import LEFT, Drain
from pdserve.kvpool.tiers.base import PageMemory, PutResult, TierPage
from pdserve.kvpool.tiers.ssd.tier import SegmentTier
from tests.support.kvpool.moving_nodes import Nodes
from tests.support.kvpool.nodes import keys as some_keys
from tests.support.suite.extended import extended
from tests.support.waiting import SOON_S, until


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    found = Nodes(tmp_path)
    yield found
    found.close()


def fill(nodes: Nodes, keys: list[bytes]) -> None:
    """Each page at its owner, as clients write."""
    for name, places in nodes.ring().split(keys).items():
        with nodes.client(name) as client:
            mine = [keys[i] for i in places]
            assert client.put(mine) == mine


def check_owned(nodes: Nodes, keys: list[bytes]) -> None:
    """Every page is at its owner, readable, and elsewhere as a replica only."""
    for name, places in nodes.ring().split(keys).items():
        mine = [keys[i] for i in places]
        with nodes.client(name) as client:
            assert len(client.get(mine)) == len(mine)
        assert all(nodes.owners(key) == [name] for key in mine)


def test_pages_that_are_on_ssd_only_move_to_a_node_that_joins_and_from_one_that_drains(
    nodes: Nodes, tmp_path: Path
) -> None:
    def start(name: str) -> PoolNode:
        tier = TierConfig(kind="ssd", path=tmp_path / f"{name}.ssd", capacity_bytes=64 << 20, write="all")
        sizes = {"capacity_bytes": 4 << 20, "promotion_timeout_s": 10.0}
        return nodes.start(name, tiers=[tier], **sizes)

    def only_in_tiers(node: PoolNode) -> list[bytes]:
        state = node.state
        return [k for k in keys if state.tiers.has(1, k) and state.store.find(1, k) < 0]

    def check_all_there(count_at: dict[PoolNode, int]) -> None:
        """Each page at its owner, byte for byte, and nowhere else, in memory or below."""
        for name, places in nodes.ring().split(keys).items():
            mine = [keys[i] for i in places]
            with nodes.client(name) as client:
                for start in range(0, len(mine), 8):
                    assert client.get(mine[start : start + 8]) == mine[start : start + 8]
            node = nodes.nodes[name]
            assert len(mine) == count_at[node]
            state = node.state
            assert {*state.store.index.namespace(1).committed, *state.tiers.keys(1)} == set(mine)

    keys = some_keys(400, seed=13)
    first = start("n0")
    for begin in range(0, len(keys), 16):
        with nodes.client("n0") as client:
            client.put(keys[begin : begin + 16])
        until(lambda end=begin + 16: first.state.tiers.status()[0].counters["stored"] >= end, "stored")
    assert len(only_in_tiers(first)) > 200
    second = start("n1")
    nodes.settle()
    moved = nodes.counters("n0")["pages_pushed"]
    assert 100 < moved < 300
    check_all_there({first: len(keys) - moved, second: moved})
    assert len(only_in_tiers(first)) > 10
    with nodes.client("n0") as client:
        assert client.connection.call(Drain(9), time.monotonic() + 5) == m.Done(9)
    nodes.settle()
    until(lambda: first.gossip.cluster.me.status == LEFT, "n0 has left")
    nodes.stop("n0")
    check_all_there({second: len(keys)})


@pytest.mark.parametrize("write", [extended("all"), "cold"])
def test_a_node_with_little_memory_is_pushed_to_no_faster_than_its_tier_writes(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Literal["all", "cold"]
) -> None:
    put = SegmentTier.put

    def slow_put(tier: SegmentTier, pages: Sequence[TierPage], data: Sequence[PageMemory]) -> PutResult:
        time.sleep(0.002 * len(pages))  # a slow disk
        return put(tier, pages, data)

    monkeypatch.setattr(SegmentTier, "put", slow_put)
    nodes.start("n0")
    keys = some_keys(800, seed=14)
    fill(nodes, keys)
    tier = TierConfig(kind="ssd", path=tmp_path / "ssd", capacity_bytes=256 << 20, write=write)
    second = nodes.start("n1", tiers=[tier], capacity_bytes=2 << 20)
    nodes.settle()
    assert nodes.counters("n0")["pages_pushed"] > 300
    assert second.state.tiers.counters()["evicted_unwritten"] == 0


def test_a_page_that_moves_has_the_rest_of_its_time_to_live(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, namespaces=[NamespaceConfig(name="ns", ttl_s=3600.0)])
    try:
        first = nodes.start("n0")
        keys = some_keys(300, seed=12)
        fill(nodes, keys)
        both = Ring([NodeAddress("n0", ""), NodeAddress("n1", "")])
        moving = [key for key in keys if both.owner(key).node == "n1"]
        over, late = set(moving[:20]), set(moving[20:])

        def age() -> None:
            """As if they had been written long ago; some of them end while they move."""
            store = first.state.store
            for key in moving:
                store.facts.committed_s[store.find(1, key)] -= 7200.0 if key in over else 1000.0

        nodes.run("n0", age)
        began_s = time.monotonic()
        second = nodes.start("n1")
        nodes.settle()
        until(lambda: second.state.store.index.namespace(1).gone["ttl"] == len(over), "they ended")
        assert {key for key in moving if nodes.holders(key) == ["n1"]} == late
        facts, find = second.state.store.facts, second.state.store.find
        for key in late:
            lived_s = time.monotonic() - facts.committed_s[find(1, key)]
            assert 1000.0 <= lived_s <= 1000.0 + 2 * (time.monotonic() - began_s) + SOON_S
    finally:
        nodes.close()


def test_an_owner_that_hangs_in_the_middle_costs_only_time(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "RETRY_S", 0.02)
    monkeypatch.setattr(page_push, "TIMEOUT_S", 0.3)
    for name in ("n0", "n1"):
        nodes.start(name, moving=MovingConfig(bytes_s=2_000_000))
    nodes.settle()
    keys = some_keys(600, seed=5)
    fill(nodes, keys)
    stuck = nodes.start("n2")
    until(lambda: nodes.counters("n0")["pages_pushed"] > 20, "n0 pushes")
    stuck.received = lambda connection, message: None  # type: ignore[method-assign]  # reads, never answers

    def given_up() -> bool:
        nodes.tell()
        return all(nodes.counters(name)["peers_given_up"] == 1 for name in ("n0", "n1"))

    until(given_up, "both give up on n2")
    del stuck.received
    nodes.settle()
    for name, places in nodes.ring().split(keys).items():
        mine = [keys[i] for i in places]
        with nodes.client(name) as client:
            assert len(client.get(mine)) == len(mine) or name == "n2"


def test_a_damaged_page_does_not_move(nodes: Nodes) -> None:
    source = nodes.start("n0")
    keys = some_keys(100, seed=8)
    fill(nodes, keys)
    both = Ring([NodeAddress("n0", ""), NodeAddress("n1", "")])
    damaged = next(key for key in keys if both.owner(key).node == "n1")
    store = source.state.store
    source.arena.memory[store.slots.offset(store.find(1, damaged))] = 255
    nodes.start("n1")
    nodes.settle()
    assert nodes.holders(damaged) == []
    check_owned(nodes, [key for key in keys if key != damaged])


@pytest.mark.parametrize("path", ["ucx", "tcp"])
def test_pages_go_to_a_node_on_another_host(nodes: Nodes, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr("pdserve.kvpool.node.peers.peer_link.host_id", lambda: "another host")
    nodes.start("n0", ucx=UcxConfig(enabled=path == "ucx"))
    keys = some_keys(300, seed=9)
    fill(nodes, keys)
    nodes.start("n1")
    nodes.settle()
    assert nodes.counters("n0")["pages_pushed"] > 50
    check_owned(nodes, keys)
