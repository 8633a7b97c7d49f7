from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ConfigError
from pdserve.kvpool.cluster.ring import MAX_WEIGHT_SUM, Ring, in_order, positions_of
from pdserve.kvpool.protocol.messages import NodeAddress

KEYS = [random.Random(seed).randbytes(32) for seed in range(20_000)]


def nodes(*weights: int) -> list[NodeAddress]:
    return [NodeAddress(f"n{i}", f"tcp:h{i}:1", weight) for i, weight in enumerate(weights)]


@given(st.lists(st.lists(st.integers(0, 40) | st.integers((1 << 64) - 40, (1 << 64) - 1)), max_size=9))
def test_points_are_sorted_and_equal_ones_stay_in_the_order_of_their_nodes(points: list[list[int]]) -> None:
    positions, owners = in_order([np.array(each, np.uint64) for each in points])
    wanted = sorted((at, number) for number, each in enumerate(points) for at in each)
    assert list(zip(positions.tolist(), owners.tolist(), strict=True)) == wanted


@pytest.mark.parametrize("weights", [(1, 1), (1, 1, 1, 1, 1), (1, 2, 4), (16, 16, 8)])
def test_shares_follow_the_weights(weights: tuple[int, ...]) -> None:
    counts = np.bincount(Ring(nodes(*weights)).owners(KEYS), minlength=len(weights))
    wanted = np.array(weights) / sum(weights)
    assert np.abs(counts / len(KEYS) / wanted - 1).max() < 0.12


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_only_the_new_owners_keys_move_on_join_and_few_of_them(n: int) -> None:
    before = Ring(nodes(*[1] * n))
    after = Ring([*before.nodes, NodeAddress("new", "tcp:new:1")])
    moved = [k for k in KEYS if before.owner(k) != after.owner(k)]
    assert all(after.owner(k).node == "new" for k in moved)
    assert len(moved) / len(KEYS) <= 1.1 / (n + 1)


def test_only_the_lost_nodes_keys_move_on_leave() -> None:
    before = Ring(nodes(1, 1, 1))
    after = Ring([node for node in before.nodes if node.node != "n1"])
    for key in KEYS[:2000]:
        if before.owner(key).node == "n1":
            assert after.owner(key).node != "n1"
            assert before.successors(key, 2)[1] == after.owner(key)
        else:
            assert after.owner(key) == before.owner(key)


def test_split_agrees_with_owner_and_covers_every_place_once() -> None:
    ring = Ring(nodes(1, 2, 1))
    parts = ring.split(KEYS[:1000])
    assert sorted(place for places in parts.values() for place in places) == list(range(1000))
    assert all(ring.owner(KEYS[p]).node == name for name, places in parts.items() for p in places)
    assert Ring(nodes(1)).split(KEYS[:3]) == {"n0": [0, 1, 2]}
    assert ring.split([]) == {}


def test_successors_are_different_nodes_owner_first() -> None:
    ring = Ring(nodes(1, 1, 1, 1))
    for key in KEYS[:200]:
        found = ring.successors(key, 3)
        assert found[0] == ring.owner(key)
        assert len({node.node for node in found}) == 3
    assert len(ring.successors(KEYS[0], 99)) == 4


def test_every_process_builds_the_same_ring_whatever_the_order() -> None:
    ring = Ring(nodes(1, 2, 3))
    assert (Ring(list(reversed(nodes(1, 2, 3)))).owners(KEYS) == ring.owners(KEYS)).all()
    code = (
        "import sys, hashlib, numpy as np\n"
        "from pdserve.kvpool.cluster.ring import Ring\n"
        "from pdserve.kvpool.protocol.messages import NodeAddress\n"
        "ring = Ring([NodeAddress(f'n{i}', '', w) for i, w in enumerate((1, 2, 3))])\n"
        "keys = [hashlib.sha256(bytes([i])).digest() for i in range(200)]\n"
        "print(''.join(map(str, ring.owners(keys))))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


def test_positions_after_the_last_point_wrap_to_the_first() -> None:
    ring = Ring(nodes(1, 1))
    assert ring.owner(b"\xff" * 32) == ring.owner(b"\x00" * 32)


def test_bad_rings_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="one name"):
        Ring([*nodes(1), *nodes(1)])
    with pytest.raises(ConfigError, match="add up"):
        Ring(nodes(MAX_WEIGHT_SUM, 1))
    with pytest.raises(LookupError):
        Ring([]).owner(KEYS[0])


def test_positions_have_the_owners_of_their_keys() -> None:
    ring = Ring(nodes(1, 2, 1))
    assert (ring.owners_at(positions_of(KEYS)) == ring.owners(KEYS)).all()
    assert [ring.number(name) for name in ("n0", "n2", "nobody")] == [0, 2, -1]


def test_sources_are_those_who_lost_keys_to_a_node_most_first() -> None:
    before = Ring(nodes(1, 8, 1))
    sources = Ring([*before.nodes, NodeAddress("new", "", 4)]).sources(before, "new")
    assert (sources[0], set(sources)) == ("n1", {"n0", "n1", "n2"})
    without = Ring(before.nodes[:2])
    assert without.sources(before, "n0") == ["n2"]
    assert before.sources(before, "n0") == []
    assert without.sources(before, "n2") == []
    assert before.sources(Ring([]), "n0") == []
