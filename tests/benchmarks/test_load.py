"""Loads, prompts and figures of the benchmarks' client. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lib.figures import figures_of, outcome_of
from benchmarks.lib.load import (
    Cached,
    Load,
    Session,
    Shape,
    make_load,
)
from benchmarks.soak import Sample, growth
from tests.benchmarks.scripted import record, run

shapes = st.builds(
    Shape,
    users=st.integers(1, 5),
    rounds=st.integers(1, 4),
    system_tokens=st.integers(0, 50),
    history_tokens=st.integers(0, 50),
    turn_tokens=st.integers(1, 60),
    output_tokens=st.integers(1, 20),
    keeps_history=st.booleans(),
    spread=st.sampled_from([0.0, 0.3, 0.9]),
)
seeds = st.integers(0, 2**32)


def prompts(load: Load, session: int) -> list[list[int]]:
    """The prompts of a session whose answers are all of the planned length."""
    session_, found = Session(load.seed, load.keeps_history), []
    for request in load.sessions[session]:
        found.append(list(session_.prompt(request)["prompt"]))
        session_.receive(request, [9] * request.output_tokens)
    return found


def shared(one: list[int], other: list[int]) -> int:
    """How many tokens they begin with in common."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(np.array(one[:length]) != np.array(other[:length]))
    return int(differ[0]) if len(differ) else length


@settings(deadline=None)
@given(shapes, seeds)
def test_prompts_have_the_planned_lengths_and_repeat_what_they_should(shape: Shape, seed: int) -> None:
    load = make_load(shape, seed)
    assert len(load.requests) == shape.users * shape.rounds
    for session in load.sessions:
        said = prompts(load, session[0].session)
        assert [len(prompt) for prompt in said] == [request.prompt_tokens for request in session]
        assert [request.turn for request in session] == list(range(1, shape.rounds + 1))
        for before, after, request in zip(said, said[1:], session, strict=False):
            repeats = shape.keeps_history
            assert (after[: len(before)] == before) == repeats or len(before) <= shape.system_tokens
            if repeats:
                assert after[len(before) : len(before) + request.output_tokens] == [9] * request.output_tokens


@settings(deadline=None)
@given(shapes, seeds)
def test_reusable_tokens_are_what_a_cache_that_forgets_nothing_would_have(shape: Shape, seed: int) -> None:
    load = make_load(shape, seed)
    said = {request.session: prompts(load, request.session) for request in load.requests}
    seen: list[list[int]] = []
    for request in load.requests:  # in the order they are due: round by round
        prompt = said[request.session][request.turn - 1]
        found = max((shared(prompt, before) for before in seen), default=0)
        chance = 2  # two texts may begin with the same token by chance
        assert request.reusable_tokens <= found <= request.reusable_tokens + chance
        seen.append(prompt + [9] * request.output_tokens)


def test_asks_arrive_at_the_rate_that_was_asked_for() -> None:
    load = make_load(Shape(users=200, rounds=10, turn_tokens=1, output_tokens=1), 3, rate_s=4.0)
    times = np.array([request.at_s for request in load.requests])
    gaps = np.diff(times)
    assert 1 / gaps.mean() == pytest.approx(4.0, rel=0.1)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # exponential: as many are close as far apart


# --- figures


def test_what_failed_is_counted_by_kind_and_measured_nowhere() -> None:
    bad = [
        record(1, 0.1, error="stalled", detail="a"),
        record(2, None, error="status 429", detail="b"),
        record(2, None, error="status 429", detail="c"),
    ]
    outcome = outcome_of(run(record(1, 1.0), *bad))
    assert outcome.errors == {"status 429": 2, "stalled": 1}
    assert outcome.first_details == {"stalled": "a", "status 429": "b"}
    assert (outcome.all.requests, outcome.all.failed) == (4, 3)
    assert outcome.all.first_token_ms.p99 == 1000.0
    assert outcome.all.prompt_tokens == 100
    assert outcome.later is not None
    assert outcome.later.first_token_ms.p50 is None


def test_cached_tokens_by_place_and_what_could_have_been_cached() -> None:
    figures = figures_of(
        [
            record(2, 1.0, reusable_tokens=90, cached=Cached(60, 10, 20, 30)),
            record(2, 1.0, reusable_tokens=90, cached=Cached(20)),
        ]
    )
    assert figures.cached == Cached(80, 10, 20, 30)
    assert (figures.cached_share, figures.reusable_share) == (0.4, 0.9)
    assert figures_of([record(1, 1.0)]).cached.device is None


@pytest.mark.parametrize(
    ("more", "sent_s", "says"),
    [
        ({}, 0.0, None),
        ({"client_cpu": 0.95}, 0.0, "95% of a core"),
        ({"others_cpu": 0.5}, 0.0, "other processes took 50% of a core"),
        ({}, 0.4, "late itself, by 400 ms"),
        ({"lags_s": [0.3] * 50}, 0.0, "late itself, by 300 ms"),
        ({"lags_s": [0.0] * 5000}, 0.3, "late itself, by 300 ms"),
    ],
)
def test_a_client_that_measures_itself_says_so(more: dict[str, Any], sent_s: float, says: str | None) -> None:
    warnings = outcome_of(run(record(1, 1.0, sent_s=sent_s), **more)).warnings
    assert [says in warning for warning in warnings] == [True] if says else warnings == []


def test_what_grows_in_the_second_half_of_a_soak_is_told_an_hour() -> None:
    def sample(at: int, name: str, memory_bytes: int) -> Sample:
        return Sample(at_s=float(at), name=name, memory_bytes=memory_bytes, descriptors=40)

    samples = [sample(at, "router", 1000 + max(0, at - 100)) for at in range(200)]
    found = list(growth([*samples, sample(0, "decode0", 5)], 7200.0))
    assert [(name, what) for name, what, *_ in found] == [
        ("router", "memory_bytes"),
        ("router", "descriptors"),
    ]
    memory, descriptors = (an_hour for *_, an_hour in found)
    assert memory == pytest.approx(2 * 50 / 1024.5)  # 50 more in half an hour
    assert descriptors == 0.0
