"""The simulation of a load: a worker by hand, whole runs, and what more workers bring."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulate.engine import Engine
from benchmarks.simulate.model import (
    Rates,
    Request,
    Setting,
    Size,
    make_request,
    turning,
)
from benchmarks.simulate.simulate import outcomes, simulate
from pdserve.router.config.limits import ServiceLevel

RATES = Rates(
    prefill_ms_per_token=0.1, step_ms=10.0, step_ms_per_request=1.0, pool_ms_per_token=0.01, hop_ms=5.0
)
SETTING = Setting(rates=RATES, level=ServiceLevel(ttft_ms=150.0, itl_ms=15.0))
SIZES = (
    Size(agg=1),
    Size(agg=3),
    Size(elastic=1),
    Size(elastic=3),
    Size(prefill=1, decode=1),
    Size(prefill=2, decode=1, elastic=2),
)
TURNING = msgspec.structs.replace(
    SETTING,
    rates=msgspec.structs.replace(RATES, step_ms_per_request=0.5, pool_ms_per_token=0.005, hop_ms=10.0),
    level=ServiceLevel(ttft_ms=2000.0, itl_ms=30.0),
)


def drained(engine: Engine[str]) -> list[tuple[str, str, float]]:
    """(what, job, time in ms) until nothing is left to do."""
    found = []
    while (now_s := engine.next_s()) != float("inf"):
        computed, answered = engine.advance(now_s)
        found += [("computed", job, round(1e3 * now_s, 3)) for job in computed]
        found += [("answered", job, round(1e3 * now_s, 3)) for job in answered]
    return found


def test_prompts_go_first_and_answers_stand_still_meanwhile() -> None:
    engine: Engine[str] = Engine(RATES, 8)
    engine.submit("a", 0.1, 10)
    engine.submit("b", 0.1, 10)
    assert drained(engine) == [
        ("computed", "a", 100.0),
        ("computed", "b", 200.0),
        ("answered", "a", 320.0),  # 10 steps of 12 ms for two
        ("answered", "b", 320.0),
    ]


def request(at_s: float, *blocks: int, prompt: int = 1000, answer: int = 11) -> Request:
    return make_request(at_s, prompt, answer, blocks or (int(at_s * 1e6), int(at_s * 1e6) + 1))


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
    found = simulate(load, size, setting)
    assert found.requests == len(load)
    assert 0 <= found.in_time <= 1
    assert 0 <= found.cached < 1
    assert len(found.in_time_by_part) <= 4
    assert simulate(load, size, setting) == found, "the same arguments, the same outcome"


def test_more_workers_of_each_kind_keep_a_level_that_fewer_do_not() -> None:
    load = turning(2, 800, 4.0)
    few, many = (list(outcomes(load, count, TURNING)) for count in (2, 12))
    for less, more, kind in zip(few, many, ("decode", "elastic", "agg"), strict=True):
        assert getattr(more.size, kind)
        assert (less.size.total, more.size.total) == (2, 12)
        assert less.in_time < 0.9 <= more.in_time
