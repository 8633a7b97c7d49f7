"""Who is taken for dead, and when."""

from __future__ import annotations

import pytest

from pdserve.kvpool.cluster import failure_detector as d
from tests.support.kvpool.cluster_sim import Sim

TIMING = d.Timing()
BOUND_S = 2.0  # R10
SEEDS = range(5)


def detector(**others: int) -> d.Detector:
    found = d.Detector("me", TIMING, 0.0)
    pings = found.handle(d.Known(others, {}), 0.0)
    assert sorted(pings, key=str) == sorted((d.Ping(node) for node in others), key=str)
    return found


def ticks(detector: d.Detector, from_s: float, to_s: float) -> list[tuple[float, d.Action]]:
    """Every action of regular ticks, but Sync, with its time."""
    out = []
    now_s = from_s
    while now_s < to_s - 1e-9:
        now_s = round(now_s + 0.1, 6)
        out += [(now_s, a) for a in detector.handle(d.Tick(), now_s) if not isinstance(a, d.Sync)]
    return out


def test_a_member_that_announced_its_silence_is_excused_for_a_while() -> None:
    it = detector(a=1, b=1)
    it.handle(d.Upgrading("a"), 0.1)
    assert it.handle(d.PingEnded("a", "refused"), 0.2) == []
    found = []
    for step in range(1, 110):
        now_s = 0.2 + step / 10
        it.handle(d.Heard("b"), now_s)
        for action in it.handle(d.Tick(), now_s):
            if action == d.Ping("a"):
                found += it.handle(d.PingEnded("a", "refused"), now_s)
            found.append(action)
        if now_s < 0.1 + d.UPGRADE_S - 0.01:
            assert d.Ask("b", "a") not in found
    assert d.Ask("b", "a") in found  # it did not come back
    assert found.count(d.Ping("a")) < 45


def test_one_helper_that_reached_the_suspect_saves_it() -> None:
    it = detector(a=1, b=1, c=1)
    for node in "bc":
        it.handle(d.PingEnded(node, "answered"), 0.01)
    it.handle(d.PingEnded("a", "refused"), 0.01)
    asked = it.handle(d.PingEnded("a", "refused"), 0.02)
    assert {a.helper for a in asked if isinstance(a, d.Ask)} == {"b", "c"}
    assert it.handle(d.Asked("a", "b", False), 0.03) == []
    assert it.handle(d.Asked("a", "c", True), 0.04) == []
    assert it.handle(d.Asked("a", "b", False), 0.05) == []  # an answer that comes twice
    assert not any(isinstance(a, d.Dead) for _, a in ticks(it, 0.05, 0.6))


@pytest.mark.parametrize("count", [1, 2, 4, 9, 30])
def test_every_member_is_watched_by_as_many_as_there_can_be(count: int) -> None:
    names = [f"node{i}" for i in range(count)]
    watchers = dict.fromkeys(names, 0)
    for name in names:
        it = d.Detector(name, TIMING, 0.0)
        it.handle(d.Known({other: 1 for other in names if other != name}, {}), 0.0)
        assert name not in it.watched
        for other in it.watched:
            watchers[other] += 1
    assert set(watchers.values()) == {min(TIMING.watched, count - 1)}


def test_every_member_dead_or_alive_is_told_everything_from_time_to_time() -> None:
    it = detector(a=1, b=1)
    it.handle(d.Known({"a": 1, "b": 1}, {"x": 1, "y": 1}), 0.0)
    told = set()
    for second in range(1, 60):
        told |= {a.node for a in it.handle(d.Tick(), float(second)) if isinstance(a, d.Sync)}
    assert told == {"a", "b", "x", "y"}


# --- many nodes


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("names", ["ab", "abc", "abcdefgh"])
def test_a_process_that_ended_is_out_of_all_views_in_time(names: str, seed: int) -> None:
    sim = Sim(names, seed)
    assert sim.agree(names)
    sim.nodes["b"].up = False
    took_s = sim.run_until(lambda: sim.agree(names.replace("b", "")), BOUND_S)
    assert took_s < TIMING.ping_interval_s + 0.2


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("names", ["ab", "abc", "abcdefgh"])
def test_a_machine_that_fell_silent_is_out_of_all_views_in_time(names: str, seed: int) -> None:
    sim = Sim(names, seed)
    rest = names.replace("b", "")
    sim.part("b", rest)
    sim.nodes["b"].up = False
    sim.run_until(lambda: sim.agree(rest), BOUND_S)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_but_living_node_stays(seed: int) -> None:
    sim = Sim("abc", seed)
    sim.slow["b"] = 0.3
    sim.run(20)
    assert set(sim.views().values()) == {"abc"}
    assert not any(node.deaths for node in sim.nodes.values())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("cut", [{("a", "b")}, {("b", "a")}, {("a", "b"), ("b", "a")}])
def test_two_nodes_that_cannot_reach_each_other_do_not_divide_the_pool(
    cut: set[tuple[str, str]], seed: int
) -> None:
    sim = Sim("abc", seed)
    sim.cut |= cut
    sim.run(20)
    assert set(sim.views().values()) == {"abc"}
    assert not any(node.deaths for node in sim.nodes.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_both_sides_of_a_partition_go_on_and_find_together(seed: int) -> None:
    sim = Sim("abcde", seed)
    epoch = sim.nodes["a"].cluster.epoch
    sim.part("ab", "cde")
    wanted = {"a": "ab", "b": "ab", "c": "cde", "d": "cde", "e": "cde"}
    sim.run_until(lambda: sim.views() == wanted, 2 * BOUND_S)
    sim.run(5)
    assert sim.views() == wanted
    assert all(node.cluster.epoch > epoch for node in sim.nodes.values())
    epoch = max(node.cluster.epoch for node in sim.nodes.values())
    sim.cut.clear()
    sim.run_until(lambda: sim.agree("abcde"), 5)
    assert sim.nodes["a"].cluster.epoch > epoch
    sim.run(5)
    assert sim.agree("abcde")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("pause_s", [0.5, 5.0, 60.0])
def test_a_paused_node_is_dead_at_most_until_it_runs_again(pause_s: float, seed: int) -> None:
    sim = Sim("abc", seed)
    epoch = sim.nodes["a"].cluster.epoch
    sim.nodes["b"].paused = True
    sim.run(pause_s)
    if pause_s > BOUND_S:
        assert sim.agree("ac")
    sim.nodes["b"].resume()
    sim.run_until(lambda: sim.agree("abc"), 2.5)
    sim.run(3)
    assert sim.agree("abc")
    assert sim.nodes["b"].deaths == []
    assert (sim.nodes["a"].cluster.epoch > epoch) == (pause_s > BOUND_S)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("away_s", [0.0, 0.05, 0.2, 3.0])
def test_a_node_restarted_under_its_name_is_back_whether_missed_or_not(away_s: float, seed: int) -> None:
    sim = Sim("abc", seed)
    sim.nodes["b"].up = False
    sim.run(away_s)
    again = sim.start("b")
    sim.run_until(lambda: sim.agree("abc"), 3)
    sim.run(3)
    assert sim.agree("abc")
    assert sim.nodes["a"].cluster.members["b"].incarnation == again.cluster.me.incarnation
