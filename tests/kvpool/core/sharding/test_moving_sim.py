"""Whole pools in simulated time: pages are found while they move, and are at their owners in the end."""

from __future__ import annotations

import pytest

from pdserve.kvpool.protocol.cluster_messages import LEFT
from tests.support.kvpool.moving_sim import Sim
from tests.support.suite.extended import extended

SEEDS = [*range(3), *(extended(seed) for seed in range(3, 12))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_joins_and_another_drains_and_no_reader_misses_a_page(seed: int) -> None:
    sim = Sim(seed, 3, loss=0.05 * (seed % 2))
    sim.write(60)
    sim.run(5.0)
    joined = sim.join()
    for _ in range(10):
        sim.write(2)
        sim.read(5)
        sim.run(0.1)
    sim.settle()
    sim.check_all()
    assert len(sim.steady) >= 60
    assert any(joined.holds(k) for k in sim.written)
    drained = sim.rng.choice(sim.active)
    sim.drain(drained)
    for _ in range(10):
        sim.read(5)
        sim.run(0.1)
    sim.settle()
    sim.check_all()
    assert drained.cluster.me.status == LEFT
    assert sim.reads > 50
    assert not sim.missed or sim.loss


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_every_page_that_a_living_node_has_is_at_its_owner_in_the_end(seed: int) -> None:
    sim = Sim(seed, 2 + seed % 3, loss=0.15 * (seed % 2))
    for _ in range(14):
        what = sim.rng.choice(["write", "write", "join", "drain", "kill", "restart", "wait"])
        dead = [node for node in sim.nodes.values() if not node.up]
        if what == "write":
            sim.write(15)
            sim.read(15)
        elif what == "join" and len(sim.up) < 6:
            sim.join()
        elif what == "drain" and len(sim.active) > 1:
            sim.drain(sim.rng.choice(sim.active))
        elif what == "kill" and len(sim.active) > 1:
            sim.kill(sim.rng.choice(sim.up))
        elif what == "restart" and dead:
            sim.rng.choice(dead).start()
        sim.run(sim.rng.choice([0.0, 0.02, 0.3, 3.0]))
    sim.loss = 0.0
    sim.settle()
    sim.check_all()
