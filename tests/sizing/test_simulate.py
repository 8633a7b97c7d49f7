"""A whole simulation: requests by hand, and what holds for every load."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.dice import Dice
from benchmarks.simulate.load import Request, make_request, turning
from benchmarks.simulate.rates import Rates
from benchmarks.simulate.simulate import Simulation, simulate
from benchmarks.simulate.size import Setting, Size
from pdserve.router.config.slo import ServiceLevel

RATES = Rates(
    prefill_ms_per_token=0.1, step_ms=10.0, step_ms_per_request=1.0, pool_ms_per_token=0.01, hop_ms=5.0
)
FAST_STEPS = msgspec.structs.replace(RATES, step_ms_per_request=0.1)
SETTING = Setting(rates=RATES, level=ServiceLevel(ttft_ms=150.0, itl_ms=15.0))
SIZES = (
    Size(agg=1),
    Size(agg=3),
    Size(elastic=1),
    Size(elastic=3),
    Size(prefill=1, decode=1),
    Size(prefill=2, decode=1, elastic=2),
)


def request(at_s: float, *blocks: int, prompt: int = 1000, answer: int = 11) -> Request:
    return make_request(at_s, prompt, answer, blocks or (int(at_s * 1e6), int(at_s * 1e6) + 1))


def test_an_aggregated_worker_computes_and_answers() -> None:
    found = simulate([request(0.0)], Size(agg=1), SETTING)
    assert found.ttft_ms["p50"] == 100.0
    assert found.itl_ms["p50"] == 11.0
    assert found.in_time == 1.0
    assert found.cached == 0.0


def test_a_hand_over_takes_its_time_and_keeps_prompts_away_from_answers() -> None:
    found = simulate([request(0.0)], Size(prefill=1, decode=1), SETTING)
    assert found.ttft_ms["p50"] == pytest.approx(100 + 5 + 10 + 3.2)
    two = [request(0.0), request(0.06)]
    together = simulate(two, Size(agg=1), SETTING)
    assert together.in_time == 0.5
    assert together.slow == 0.5, "the second prompt stalls the first answer"
    apart = simulate(two, Size(prefill=1, decode=1), SETTING)
    assert apart.slow == 0.0


def test_what_was_computed_is_found_by_the_worker_itself_and_through_the_pool() -> None:
    twice = [request(0.0, 1, 2), request(10.0, 1, 2)]
    assert simulate(twice, Size(agg=1), SETTING).cached == pytest.approx(999 / 2000, abs=1e-4)
    only_pool = msgspec.structs.replace(SETTING, worker_blocks=0)
    found = simulate(twice, Size(agg=1), only_pool)
    assert found.cached == pytest.approx(999 / 2000, abs=1e-4)
    nothing = msgspec.structs.replace(only_pool, pool_blocks=0)
    assert simulate(twice, Size(agg=1), nothing).cached == 0.0


def test_what_one_worker_computes_though_another_has_it_is_counted() -> None:
    nothing = msgspec.structs.replace(SETTING, pool_blocks=0)
    together = [request(0.0, 1, 2), request(0.0, 1, 2), request(10.0, 1, 2)]
    one, two = simulate(together, Size(agg=1), nothing), simulate(together, Size(agg=2), nothing)
    assert one.computed_twice == 0.0
    assert two.computed_twice == 0.0, "at the same time nobody has it yet"
    apart = [request(0.0, 1, 2), request(0.05, 3, 4), request(0.3, 1, 2, answer=300), request(0.6, 1, 2)]
    busy = msgspec.structs.replace(nothing.rates, prefill_ms_per_token=0.001)
    told = msgspec.structs.replace(nothing, rates=busy)
    found = simulate(apart, Size(agg=2), told)
    assert found.computed_twice + found.cached == pytest.approx(2 * 999 / 4000, abs=1e-3)


def test_a_router_that_knows_places_finds_what_beliefs_are_wrong_about() -> None:
    """Two workers have a prompt, and one of them evicts it."""
    believes = msgspec.structs.replace(SETTING, pool_blocks=0, worker_blocks=2)
    knows = msgspec.structs.replace(believes, knows_places=True)
    load = [request(0.0, 1, 2), request(0.0, 1, 2), request(10.0, 3, 4), request(20.0, 1, 2)]
    other = [*load[:3], request(15.0, 3, 4), load[3]]  # equal workers alternate
    assert [simulate(one, Size(agg=2), knows).computed_twice for one in (load, other)] == [0.0, 0.0]
    assert sum(simulate(one, Size(agg=2), believes).computed_twice for one in (load, other)) > 0.0


LOADS = st.lists(
    st.tuples(
        st.floats(0, 0.5), st.integers(1, 6000), st.integers(1, 60), st.lists(st.integers(0, 40), max_size=12)
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=40, deadline=None)
@given(drawn=LOADS, size=st.sampled_from(SIZES), max_running=st.integers(1, 8))
def test_every_request_is_served_and_no_load_stays_counted(
    drawn: list[tuple[float, int, int, list[int]]], size: Size, max_running: int
) -> None:
    load, at_s = [], 0.0
    for wait_s, prompt, answer, blocks in drawn:
        at_s += wait_s
        load.append(make_request(at_s, prompt, answer, tuple(blocks)))
    setting = msgspec.structs.replace(SETTING, max_running=max_running, worker_blocks=8, pool_blocks=20)
    simulation = Simulation(load, size, setting)
    found = simulation.run()
    assert found.requests == len(load)
    assert 0 <= found.in_time <= 1
    assert 0 <= found.cached < 1
    assert len(found.in_time_by_part) <= 4
    for worker in simulation._fleet.workers:
        assert (worker.in_flight, worker.prefilling, worker.queued_here) == (0, 0, 0)
    assert simulate(load, size, setting) == found, "the same arguments, the same outcome"


def test_duties_do_not_flap_under_a_steady_load() -> None:
    """Poisson arrivals, lengths at random: five minutes, in which 30 changes would be allowed."""
    dice, at_s, load = Dice("steady"), 0.0, []
    for number in range(1200):
        at_s -= math.log(1 - dice.between(0, 0.999)) / 4
        prompt, answer = round(dice.between(200, 6000)), round(dice.between(50, 300))
        load.append(make_request(at_s, prompt, answer, (number,)))
    level = ServiceLevel(ttft_ms=2000.0, itl_ms=14.0)
    found = simulate(load, Size(elastic=4), msgspec.structs.replace(SETTING, level=level, rates=FAST_STEPS))
    assert 1 <= found.duty_changes <= 5


def test_a_seed_makes_the_same_load_and_another_seed_another_one() -> None:
    assert turning(1, 50, 2.0) == turning(1, 50, 2.0)
    assert turning(1, 50, 2.0) != turning(2, 50, 2.0)
    load = turning(1, 400, 2.0)
    assert [one.at_s for one in load] == sorted(one.at_s for one in load)
    first, second = load[:200], load[200:]
    assert min(one.prompt_tokens for one in first) > max(one.prompt_tokens for one in second)
    assert max(one.output_tokens for one in first) < min(one.output_tokens for one in second)
    assert load[-1].at_s == pytest.approx(200, rel=0.2)
