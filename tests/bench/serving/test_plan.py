"""The pure parts of `python -m benchmarks multiturn`: loads, prompts, figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.serving.figures import figures_of, outcome_of, quantiles_ms
from benchmarks.serving.load.plan import PRESETS, Load, Shape, Span, make_load, replay_load
from benchmarks.serving.load.records import Cached
from benchmarks.serving.load.words import ChatTalk, IdTalk, ids_of, words_of
from tests.support.bench.serving import record, run

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
rates = st.sampled_from([None, 0.5, 20.0])
seeds = st.integers(0, 2**32)


@dataclass
class Said:
    text: str = "yes"
    token_ids: list[int] = field(default_factory=list)


def prompts(load: Load, session: int) -> list[list[int]]:
    """The prompts of a session whose answers are all of the planned length."""
    talk, found = IdTalk(load.seed, load.keeps_history), []
    for ask in load.sessions[session]:
        found.append(list(talk.ask(ask)["prompt"]))
        talk.heard(ask, Said(token_ids=[9] * ask.output_tokens))
    return found


def shared(one: list[int], other: list[int]) -> int:
    """How many tokens they begin with in common."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(np.array(one[:length]) != np.array(other[:length]))
    return int(differ[0]) if len(differ) else length


@settings(deadline=None)
@given(shapes, seeds, rates)
def test_a_load_is_a_function_of_shape_and_seed(shape: Shape, seed: int, rate_s: float | None) -> None:
    assert make_load(shape, seed, rate_s) == make_load(shape, seed, rate_s)


@settings(deadline=None)
@given(shapes, seeds)
def test_prompts_have_the_planned_lengths_and_repeat_what_they_should(shape: Shape, seed: int) -> None:
    load = make_load(shape, seed)
    assert len(load.asks) == shape.users * shape.rounds
    for session in load.sessions:
        said = prompts(load, session[0].session)
        assert [len(prompt) for prompt in said] == [ask.prompt_tokens for ask in session]
        assert [ask.turn for ask in session] == list(range(1, shape.rounds + 1))
        for before, after, ask in zip(said, said[1:], session, strict=False):
            repeats = shape.keeps_history
            assert (after[: len(before)] == before) == repeats or len(before) <= shape.system_tokens
            if repeats:
                assert after[len(before) : len(before) + ask.output_tokens] == [9] * ask.output_tokens


@settings(deadline=None)
@given(shapes, seeds)
def test_reusable_tokens_are_what_a_cache_that_forgets_nothing_would_have(shape: Shape, seed: int) -> None:
    load = make_load(shape, seed)
    said = {ask.session: prompts(load, ask.session) for ask in load.asks}
    seen: list[list[int]] = []
    for ask in load.asks:  # in the order they are due: round by round
        prompt = said[ask.session][ask.turn - 1]
        found = max((shared(prompt, before) for before in seen), default=0)
        chance = 2  # two texts may begin with the same token by chance
        assert ask.reusable_tokens <= found <= ask.reusable_tokens + chance
        seen.append(prompt + [9] * ask.output_tokens)


@settings(deadline=None)
@given(shapes, seeds, st.sampled_from([0.5, 20.0]))
def test_the_turns_of_a_session_are_due_one_after_the_other(shape: Shape, seed: int, rate_s: float) -> None:
    load = make_load(shape, seed, rate_s)
    for session in load.sessions:
        due_s = [ask.at_s for ask in session]
        assert all(at_s is not None and at_s > 0 for at_s in due_s)
        assert due_s == sorted(due_s)  # type: ignore[type-var]


def test_asks_arrive_at_the_rate_that_was_asked_for() -> None:
    load = make_load(Shape(users=200, rounds=10, turn_tokens=1, output_tokens=1), 3, rate_s=4.0)
    times = np.array([ask.at_s for ask in load.asks])
    gaps = np.diff(times)
    assert 1 / gaps.mean() == pytest.approx(4.0, rel=0.1)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # exponential: as many are close as far apart


@pytest.mark.parametrize("seed", range(5))
def test_few_asks_too_arrive_at_the_rate_that_was_asked_for(seed: int) -> None:
    load = make_load(Shape(users=4, rounds=3, turn_tokens=1, output_tokens=1), seed, rate_s=0.25)
    assert load.asks[-1].at_s == pytest.approx(12 / 0.25)


def test_users_come_in_another_order_each_round() -> None:
    load = make_load(Shape(users=20, rounds=2, turn_tokens=1, output_tokens=1), 3, rate_s=4.0)
    orders = [[ask.session for ask in load.asks if ask.turn == turn] for turn in (1, 2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(20))
    assert orders[0] != orders[1]


@settings(deadline=None)
@given(seeds, st.integers(0, 2**40), st.integers(1, 500), st.integers(1, 500))
def test_a_shorter_span_is_a_beginning_of_a_longer_one(seed: int, source: int, one: int, other: int) -> None:
    short, long = sorted((one, other))
    assert ids_of(seed, Span(source, long))[:short] == ids_of(seed, Span(source, short))
    assert words_of(seed, Span(source, long), 0.7).startswith(words_of(seed, Span(source, short), 0.7))


traces = st.lists(
    st.tuples(st.floats(0, 100), st.integers(1, 4000), st.integers(1, 500)), min_size=1, max_size=8
)


@settings(deadline=None)
@given(traces, st.sampled_from([1.0, 0.1, 0.01]), seeds)
def test_a_replay_keeps_lengths_times_and_shared_beginnings(
    requests: list[tuple[float, int, int]], scale: float, seed: int
) -> None:
    # each second request has the first one's first block
    asked = [
        (at_s, inputs, outputs, [0 if number % 2 else 1000 + number, *range(1, -(-inputs // 512))])
        for number, (at_s, inputs, outputs) in enumerate(requests)
    ]
    load = replay_load(asked, scale=scale, speed=10.0, seed=seed)
    for (at_s, inputs, _, blocks), (ask,) in zip(asked, load.sessions, strict=True):
        assert ask.at_s == pytest.approx(at_s / 10)
        assert ask.prompt_tokens == pytest.approx(inputs * scale, abs=1 + 0.5 * len(blocks))
        assert len(prompts(load, ask.session)[0]) == ask.prompt_tokens
        assert ask.reusable_tokens <= ask.prompt_tokens


def test_equal_blocks_of_a_trace_are_equal_tokens_and_known_ones_are_reusable() -> None:
    asked = [(0.0, 1024, 10, [7, 8]), (1.0, 1500, 10, [7, 8, 9]), (2.0, 1024, 10, [5, 8])]
    load = replay_load(asked, scale=0.5, speed=1.0, seed=1)
    (one,), (two,), (three,) = (prompts(load, session) for session in range(3))
    assert shared(one, two) == len(one) == 512
    assert shared(one, three) < 3
    assert [session[0].reusable_tokens for session in load.sessions] == [0, 512, 0]


def test_presets_are_what_they_are_named_after() -> None:
    eic, document = PRESETS["eic"], PRESETS["long-input-short-output"]
    assert (eic.turn_tokens, eic.output_tokens) == (8192, 200)
    assert (document.users, document.rounds, document.system_tokens) == (15, 20, 1000)
    assert (document.history_tokens, document.output_tokens) == (20_000, 100)
    assert not PRESETS["no-reuse"].keeps_history
    assert make_load(PRESETS["no-reuse"].scaled(0.1), 1).asks[-1].reusable_tokens == 0
    assert (eic.scaled(0.1).turn_tokens, eic.scaled(0.1).output_tokens) == (819, 20)


def test_an_answer_that_never_came_is_made_up_so_that_the_load_stays_as_planned() -> None:
    load = make_load(Shape(users=1, rounds=2, turn_tokens=10, output_tokens=7), 1)
    talk = IdTalk(1, True)
    first, second = load.sessions[0]
    talk.ask(first)
    talk.heard(first, None)
    assert len(talk.ask(second)["prompt"]) == second.prompt_tokens == 27


def test_a_chat_repeats_its_messages() -> None:
    shape = Shape(users=1, rounds=2, system_tokens=4, turn_tokens=10, output_tokens=7)
    talk = ChatTalk(1, True, 1.0)
    first, second = make_load(shape, 1).sessions[0]
    before: list[Any] = list(talk.ask(first)["messages"])
    talk.heard(first, Said("indeed"))
    after = talk.ask(second)["messages"]
    assert [message["role"] for message in before] == ["system", "user"]
    assert after[:2] == before
    assert [message["role"] for message in after[2:]] == ["assistant", "user"]
    assert after[2]["content"] == "indeed"
    assert len(after[3]["content"].split()) == 10


# --- figures


def test_latency_counts_from_the_planned_time() -> None:
    late = record(1, 1.5, planned_s=0.25, due_s=1.0, sent_s=1.0)
    assert late.first_token_s == 1.25
    outcome = outcome_of(run(late))
    assert outcome.all.first_token_ms.p50 == 1250.0
    assert outcome.late_asks == 1


def test_what_failed_is_counted_by_kind_and_measured_nowhere() -> None:
    bad = [
        record(1, 0.1, error="stalled", detail="a"),
        record(2, None, error="status 429", detail="b"),
        record(2, None, error="status 429", detail="c"),
    ]
    outcome = outcome_of(run(record(1, 1.0), *bad))
    assert outcome.errors == {"status 429": 2, "stalled": 1}
    assert outcome.first_details == {"stalled": "a", "status 429": "b"}
    assert (outcome.all.asks, outcome.all.failed) == (4, 3)
    assert outcome.all.first_token_ms.p99 == 1000.0
    assert outcome.all.prompt_tokens == 100
    assert outcome.later is not None
    assert outcome.later.first_token_ms.p50 is None


def test_throughput_is_tokens_over_the_time_from_the_first_ask_to_the_last_answer() -> None:
    figures = figures_of(
        [record(2, 1.5, planned_s=1.0, done_s=3.0), record(2, 2.5, planned_s=2.0, done_s=5.0)]
    )
    assert (figures.prompt_tokens_s, figures.output_tokens_s, figures.asks_s) == (50.0, 5.0, 0.5)


def test_cached_tokens_by_place_and_what_could_have_been_cached() -> None:
    figures = figures_of(
        [
            record(2, 1.0, reusable_tokens=90, cached=Cached(60, 10, 20, 30, 5)),
            record(2, 1.0, reusable_tokens=90, cached=Cached(20)),
        ]
    )
    assert figures.cached == Cached(80, 10, 20, 30, 5)
    assert figures.cached.dram == 25
    assert (figures.cached_share, figures.reusable_share) == (0.4, 0.9)
    assert figures_of([record(1, 1.0)]).cached.device is None


@given(st.lists(st.floats(0, 1e3), min_size=1))
def test_quantiles_are_ordered_and_within_what_was_seen(values_s: list[float]) -> None:
    found = quantiles_ms(values_s)
    assert found.p50 is not None
    assert found.p90 is not None
    assert found.p99 is not None
    assert min(values_s) * 1e3 - 0.01 <= found.p50 <= found.p90 <= found.p99 <= max(values_s) * 1e3 + 0.01


@pytest.mark.parametrize(
    ("more", "sent_s", "says"),
    [
        ({}, 0.0, None),
        ({"client_cpu": 0.95}, 0.0, "95% of a core"),
        ({}, 0.4, "late itself, by 400 ms"),
        ({"lags_s": [0.3] * 50}, 0.0, "late itself, by 300 ms"),
        ({"lags_s": [0.0] * 5000}, 0.3, "late itself, by 300 ms"),
    ],
)
def test_a_client_that_measures_itself_says_so(more: dict[str, Any], sent_s: float, says: str | None) -> None:
    warnings = outcome_of(run(record(1, 1.0, sent_s=sent_s), **more)).warnings
    assert [says in warning for warning in warnings] == [True] if says else warnings == []


def test_answers_shorter_than_asked_for_are_told() -> None:
    (warning,) = outcome_of(run(record(1, 1.0, asked_tokens=11), record(1, 1.0, asked_tokens=10))).warnings
    assert warning.startswith("1 answers were shorter than asked for")
