"""`python -m benchmarks sweep`: the search for the highest rate that holds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.serving.figures import outcome_of
from benchmarks.serving.load.plan import Shape
from benchmarks.serving.load.run import Server
from benchmarks.serving.sweep import (
    LONGEST_S,
    MAX_DOUBLINGS,
    MIN_ASKS,
    Tried,
    best,
    judged,
    next_rate,
    shape_for,
    sweep,
)
from benchmarks.stores import BenchError
from tests.support.bench.scripted import ScriptedServer
from tests.support.bench.serving import record, run, serving
from tests.support.router import mock_worker as mock
from tests.support.router.mock_worker import Received, Wire


def searched(highest_s: float, start_s: float, steps: int) -> list[tuple[float, bool]]:
    """All rates tried on a server that holds up to `highest_s`."""
    tried: list[tuple[float, bool]] = []
    while (rate_s := next_rate(tried, start_s, steps)) is not None:
        tried.append((rate_s, rate_s <= highest_s))
    return tried


@given(st.floats(0.05, 50), st.floats(0.05, 50), st.integers(0, 6))
def test_the_search_closes_in_on_the_highest_rate_that_holds(
    highest_s: float, start_s: float, steps: int
) -> None:
    tried = searched(highest_s, start_s, steps)
    met = max(rate_s for rate_s, was_met in tried if was_met)
    missed = min(rate_s for rate_s, was_met in tried if not was_met)
    assert met <= highest_s < missed
    assert missed / met <= 2 ** (2.0**-steps) * 1.001  # a factor of 2, halved in ratio each time
    assert len(tried) <= 12 + steps


def test_a_search_without_end_ends() -> None:
    assert len(searched(1e12, 1.0, 3)) == MAX_DOUBLINGS + 1


@given(st.floats(0.05, 50))
def test_where_nothing_can_be_met_the_search_takes_minutes(start_s: float) -> None:
    rates = [rate_s for rate_s, _ in searched(0.0, start_s, 3)]
    assert max(MIN_ASKS / rate_s for rate_s in rates) <= LONGEST_S
    assert sum(MIN_ASKS / rate_s for rate_s in rates) <= 2 * LONGEST_S


def test_a_rate_that_was_asked_for_is_tried_however_low_it_is() -> None:
    assert searched(0.0, 1e-4, 3) == [(1e-4, False)]


def tried(rate_s: float, met: bool) -> Tried:
    return Tried(rate_s=rate_s, in_time=1.0, goodput_s=1.0, met=met, outcome=outcome_of(run(record(1, 1.0))))


def test_the_best_rate_lies_below_every_miss() -> None:
    one, lucky = tried(1.0, True), tried(8.0, True)
    assert best([one, tried(4.0, False), lucky]) is one
    assert best([one, lucky]) is lucky
    assert best([tried(4.0, False)]) is None


def test_late_and_failed_asks_are_not_in_time() -> None:
    records = [
        record(1, 0.5, done_s=1.0),
        record(1, 1.5, done_s=4.0),
        record(1, 0.5, error="cut off"),
        record(1, 2.5, planned_s=2.0),
    ]
    found = judged(3.0, records, outcome_of(run(*records)), limit_s=1.0, share=0.5)
    assert (found.in_time, found.goodput_s, found.met) == (0.5, 0.5, True)
    assert not judged(3.0, records, outcome_of(run(*records)), limit_s=1.0, share=0.6).met


@given(st.floats(0.01, 100), st.floats(1, 600), st.integers(1, 20))
def test_a_rate_gets_users_enough_for_its_time(rate_s: float, seconds: float, rounds: int) -> None:
    shape = shape_for(Shape(users=1, rounds=rounds, turn_tokens=1, output_tokens=1), rate_s, seconds)
    asks = shape.users * rounds
    assert max(10, rate_s * seconds) <= asks <= max(10, rate_s * seconds) + rounds


SHAPE = Shape(users=1, rounds=1, turn_tokens=5, output_tokens=1)
SEARCH: dict[str, Any] = {"limit_s": 60.0, "share": 0.5, "start_s": 50.0, "steps": 0, "seconds": 0.1}


def test_a_server_that_refuses_every_ask_ends_the_search_and_says_what_it_said() -> None:
    with serving(ScriptedServer()) as server:
        server.script("/v1/completions", *(mock.answer(429, {"error": "slow down"}) for _ in range(1000)))
        found = sweep(Server(server.url, silence_s=60.0), SHAPE, 1, lambda line: None, **SEARCH)
        assert not next(found).met
        with pytest.raises(BenchError, match=r"every ask failed at 50 asks/s: status 429: .*slow down"):
            next(found)


def test_no_rate_is_tried_that_would_take_longer_than_there_is_time() -> None:
    with serving(ScriptedServer()) as server:
        limited = {**SEARCH, "time_limit_s": 1e-6}
        found = sweep(Server(server.url, silence_s=60.0), SHAPE, 1, lambda line: None, **limited)
        assert next(found).met
        assert next(found, None) is None


def test_a_server_that_is_lost_during_the_last_rate_is_told_and_no_miss() -> None:
    with serving(ScriptedServer()) as server:

        async def end(wire: Wire, request: Received) -> None:
            for listening in server._servers:
                listening.close()
            raise mock.CloseConnection

        server.script("/v1/completions", *[server._default] * 9, end)
        found = sweep(
            Server(server.url, silence_s=60.0), SHAPE, 1, lambda line: None, **SEARCH, time_limit_s=1e-6
        )
        assert next(found).outcome.all.failed >= 1
        with pytest.raises(BenchError, match="does not list a model"):
            next(found)


def test_a_sweep_finds_what_a_server_of_one_at_a_time_can_take() -> None:
    """Each ask takes 20 ms, one after the other: 50 a second are the most, and fewer come in time."""
    shape = Shape(users=1, rounds=1, turn_tokens=5, output_tokens=1)
    search: dict[str, Any] = {"limit_s": 0.5, "share": 0.9, "start_s": 25.0, "steps": 0, "seconds": 0.7}
    with serving(ScriptedServer(pause_s=0.02)) as server:
        server.one_at_a_time = True
        found = list(sweep(Server(server.url, silence_s=60.0), shape, 1, lambda line: None, **search))
    chosen = best(found)
    assert chosen is not None
    assert chosen.rate_s <= 50.0
    assert min(one.rate_s for one in found if not one.met) <= 100.0
