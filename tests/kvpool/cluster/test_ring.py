from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

from pdserve.errors import ConfigError
from pdserve.kvpool.cluster.ring import ARCS, MAX_WEIGHT, Ring
from pdserve.kvpool.protocol.messages import NodeAddress

KEYS = [random.Random(seed).randbytes(32) for seed in range(20_000)]


def nodes(*weights: int) -> list[NodeAddress]:
    return [NodeAddress(f"n{i}", f"tcp:h{i}:1", weight) for i, weight in enumerate(weights)]


@pytest.mark.parametrize("weights", [(1, 1), (1, 1, 1, 1, 1), (1, 2, 4), (16, 16, 8), (1, 500)])
def test_shares_follow_the_weights(weights: tuple[int, ...]) -> None:
    counts = np.bincount(Ring(nodes(*weights)).owners(KEYS), minlength=len(weights))
    wanted = np.array(weights) / sum(weights)
    deviation = np.abs(counts / len(KEYS) - wanted)
    assert (deviation < 4 * np.sqrt(wanted * (1 / ARCS + 1 / len(KEYS)))).all()


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
            assert before.successors([key], 2)[0][1] == after.owner(key)
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
    for key, found in zip(KEYS[:200], ring.successors(KEYS[:200], 3), strict=True):
        assert found[0] == ring.owner(key)
        assert len({node.node for node in found}) == 3
    assert [len(found) for found in ring.successors(KEYS[:2], 99)] == [4, 4]
    assert Ring(nodes(5)).successors(KEYS[:1], 2) == [nodes(5)]


def test_bad_rings_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="one name"):
        Ring([*nodes(1), *nodes(1)])
    with pytest.raises(ConfigError, match="between 1 and"):
        Ring(nodes(MAX_WEIGHT + 1, 1))
    with pytest.raises(LookupError):
        Ring([]).owner(KEYS[0])


def test_the_owners_are_those_that_other_programs_of_this_version_compute() -> None:
    owners = Ring(nodes(1, 2, 3, 500)).owners(KEYS)
    assert (Ring(list(reversed(nodes(1, 2, 3, 500)))).owners(KEYS) == owners).all(), "whatever the order"
    assert hashlib.sha256(owners.astype("<i4").tobytes()).hexdigest()[:16] == "c2e11d068ad279ee"
