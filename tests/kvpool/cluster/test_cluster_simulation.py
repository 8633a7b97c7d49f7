"""A pool of 250 nodes and a million pages, driven through the product's ring and migration planner.

Time is simulated, the code is not: `Ring` places every key, and every node that gains keys runs `Migration`
against members that answer like real ones. `pytest -s` prints the figures.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from pdserve.kvpool.cluster.rebalance_plan import MigrationLimits
from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.protocol.base import NodeAddress
from tests.support.kvpool.move_model import Member, Moving

NODES = 250
KEYS = 1_000_000
PAGE_BYTES = 2 << 20
RATE = 1e9  # bytes/s that a node lets migration take
SAMPLED_NODES = 12  # of those that gain from one that leaves

Positions = npt.NDArray[np.uint64]


@pytest.fixture(scope="module")
def positions() -> Positions:
    """Of all keys, ascending: quicker to look up in this order."""
    found = np.random.default_rng(11).integers(0, 1 << 64, KEYS, dtype=np.uint64)
    found.sort()
    return found


@pytest.fixture(scope="module")
def ring() -> Ring:
    """Nodes of three sizes."""
    return Ring((NodeAddress(f"n{i:03}", f"tcp:h{i}:7700", (1, 2, 4)[i % 3]) for i in range(NODES)), epoch=1)


@pytest.fixture(scope="module")
def owners(ring: Ring, positions: Positions) -> npt.NDArray[np.int32]:
    return ring.owners_at(positions)


def rebalance(before: Ring, after: Ring, name: str, gained: Positions) -> Moving:
    """Run one node's migration: it owns `gained` now, `before` says who has them."""
    members = {node.node: Member(epoch=after.epoch) for node in before.nodes if node.node != name}
    sources = before.owners_at(gained)
    for source in np.unique(sources).tolist():
        keys = [position.tobytes() + bytes(24) for position in gained[sources == source]]
        members[before.nodes[source].node].pages = {"ns": dict.fromkeys(keys, PAGE_BYTES)}
    first = after.sources(before, name)
    ordered = {peer: members[peer] for peer in [*first, *(members.keys() - set(first))]}
    moving = Moving(ordered, MigrationLimits(bytes_s=RATE, max_peers=8), bandwidth=4 * RATE)
    moving.begin(after.epoch)
    moving.run()
    assert moving.planner.pages_pulled == len(gained)
    assert [epoch for epoch, _ in moving.settled] == [after.epoch]
    return moving


def test_every_node_holds_what_its_weight_says(ring: Ring, owners: npt.NDArray[np.int32]) -> None:
    weights = np.array([node.weight for node in ring.nodes])
    share = np.bincount(owners, minlength=NODES) / KEYS / (weights / weights.sum())
    print(
        f"\n{NODES} nodes, {KEYS:,} keys: fullest {share.max():.3f}, emptiest {share.min():.3f} of its share"
    )
    assert share.max() < 1.2
    assert share.min() > 0.8


def test_one_node_joins(ring: Ring, positions: Positions, owners: npt.NDArray[np.int32]) -> None:
    new = NodeAddress("new", "tcp:new:7700", 2)
    after = ring.joined(new)
    me = after.number("new")
    changed = after.owners_at(positions)
    gained = positions[changed == me]
    fair = new.weight / sum(node.weight for node in after.nodes)
    order = np.array([ring.number(node.node) for node in after.nodes])  # -1: the new one
    assert ((order[changed] == owners) | (changed == me)).all(), "only the new node gains keys"
    moved = len(gained) / KEYS
    moving = rebalance(ring, after, "new", gained)
    seconds, least_s = moving.settled[0][1], len(gained) * PAGE_BYTES / RATE
    print(
        f"\none joins {NODES}: {len(gained):,} keys move, {moved / fair:.3f} of the fair share; settled in "
        f"{seconds:.1f} s at {RATE / 1e9:g} GB/s, {seconds / least_s:.3f} of the time that the bytes take"
    )
    assert moved <= 1.1 * fair
    assert seconds < 1.1 * least_s + 2


def test_one_node_leaves(ring: Ring, positions: Positions, owners: npt.NDArray[np.int32]) -> None:
    gone = ring.number("n125")
    after = ring.left("n125")
    orphans = positions[owners == gone]
    heirs = after.owners_at(orphans)
    order = np.array([after.number(node.node) for node in ring.nodes])
    kept = owners != gone
    assert (after.owners_at(positions)[kept] == order[owners[kept]]).all(), "only its keys move"
    counts = np.bincount(heirs, minlength=NODES - 1)
    busiest = np.argsort(-counts)[:SAMPLED_NODES]
    seconds = max(
        rebalance(ring, after, after.nodes[i].node, orphans[heirs == i]).settled[0][1]
        for i in busiest.tolist()
    )
    print(
        f"\none of {NODES} leaves: {len(orphans):,} keys move to {np.count_nonzero(counts)} nodes, at most "
        f"{counts.max()} to one; the last of {SAMPLED_NODES} heirs has settled after {seconds:.1f} s"
    )
    assert seconds < 5
