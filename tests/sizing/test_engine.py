"""The simulated worker, by hand, and its cache of blocks."""

from __future__ import annotations

import pytest

from benchmarks.simulate.engine import BlockCache, Engine
from benchmarks.simulate.rates import Rates

RATES = Rates(prefill_ms_per_token=0.1, step_ms=10.0, step_ms_per_request=1.0)


def drained(engine: Engine[str]) -> list[tuple[str, str, float]]:
    """(what, job, time in ms) until nothing is left to do."""
    found = []
    while (now_s := engine.next_s()) != float("inf"):
        computed, answered = engine.advance(now_s)
        found += [("computed", job, round(1e3 * now_s, 3)) for job in computed]
        found += [("answered", job, round(1e3 * now_s, 3)) for job in answered]
    return found


def test_one_request_is_computed_and_then_gets_a_token_each_step() -> None:
    engine: Engine[str] = Engine(RATES, 8)
    engine.submit("a", 0.1, 10)
    assert drained(engine) == [("computed", "a", 100.0), ("answered", "a", 210.0)]


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


def test_a_prompt_in_the_middle_of_an_answer_delays_it_by_its_time() -> None:
    engine: Engine[str] = Engine(RATES, 8)
    engine.submit("a", 0.1, 10)
    assert engine.advance(0.1) == (["a"], [])
    assert engine.advance(0.155) == ([], [])  # 5 tokens
    engine.submit("b", 0.1, -1)
    assert drained(engine) == [("computed", "b", 255.0), ("answered", "a", 310.0)]


def test_at_most_so_many_requests_run_at_a_time() -> None:
    engine: Engine[str] = Engine(RATES, 1)
    engine.submit("a", 0.1, 1)
    engine.submit("b", 0.1, 0)
    assert drained(engine) == [
        ("computed", "a", 100.0),
        ("answered", "a", 111.0),
        ("computed", "b", 211.0),
        ("answered", "b", 211.0),
    ]
    assert engine.busy_s == pytest.approx(0.2)


def test_a_cache_finds_first_blocks_and_drops_the_last_ones_first() -> None:
    cache = BlockCache(3)
    cache.add((1, 2, 3))
    assert cache.found((1, 2, 9, 3)) == 2
    cache.add((1, 4))
    assert cache.found((1, 2, 3)) == 2
    assert cache.found((1, 4)) == 2
    assert BlockCache(0).found((1,)) == 0
