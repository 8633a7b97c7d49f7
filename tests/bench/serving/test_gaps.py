"""What is asked beside a stream, and what its gaps come to."""

from __future__ import annotations

import pytest

from benchmarks.serving.gaps import (
    CONVERSATIONS,
    STARTS,
    GapSample,
    Others,
    _misplaced,
    figures,
)
from benchmarks.serving.load.client import Heard
from benchmarks.serving.load.records import Cached
from benchmarks.stores import BenchError


def sample(beside: str, gaps_ms: list[float], contender: str = "agg") -> GapSample:
    first = [] if beside == "alone" else [7.0]
    return GapSample(contender=contender, beside=beside, gaps_ms=gaps_ms, first_token_ms=first)  # type: ignore[arg-type]


def test_conversations_in_the_pool_come_in_turn_and_the_last_of_them_is_on_the_device() -> None:
    others = Others(seed=1, tokens=16)
    turns = [prompt for _ in range(CONVERSATIONS // len(STARTS)) for prompt in others.prompts("pool")]
    assert len({tuple(one) for one in turns}) == CONVERSATIONS
    assert others.prompts("pool") == turns[: len(STARTS)]
    assert others.prompts("device") == [turns[len(STARTS) - 1]] * len(STARTS)
    assert others.prompts("alone") == []


def test_new_conversations_are_never_asked_again() -> None:
    others = Others(seed=1, tokens=16)
    known = [prompt for _ in range(CONVERSATIONS) for prompt in others.prompts("pool")]
    new = [prompt for _ in range(3) for prompt in others.prompts("new")]
    assert len({tuple(one) for one in new}) == 3 * len(STARTS)
    assert not any(one in known for one in new)


def test_gaps_are_compared_with_the_streams_alone_of_the_same_server() -> None:
    [alone, pool, plain] = figures(
        [
            sample("alone", [10.0] * 100),
            sample("pool", [10.0] * 98 + [20.0] * 2),
            sample("alone", [40.0] * 100, "plain"),
        ]
    )
    assert (alone.p99_over_alone, alone.first_token_ms) == (1.0, None)
    assert (pool.mean_ms, pool.p50_ms, pool.p99_ms, pool.p99_over_alone) == (10.2, 10.0, 20.0, 2.0)
    assert pool.first_token_ms == 7.0
    assert plain.p99_over_alone == 1.0


def test_without_a_stream_alone_there_are_no_figures() -> None:
    with pytest.raises(BenchError, match="agg"):
        figures([sample("pool", [1.0])])


@pytest.mark.parametrize(
    ("beside", "cached", "counts"),
    [
        ("pool", Cached(960, device=0, host=0, storage=960), True),
        ("pool", Cached(960, device=0, host=960, storage=0), False),
        ("pool", Cached(960), False),
        ("device", Cached(960, device=960, host=0, storage=0), True),
        ("device", Cached(960, device=64, host=896, storage=0), False),
        ("new", Cached(0), True),
        ("new", Cached(64, device=64), False),
    ],
)
def test_a_stream_counts_only_where_the_other_conversation_was_where_its_kind_says(
    beside: str, cached: Cached, counts: bool
) -> None:
    wrong = _misplaced(beside, Heard(sent_s=0.0, cached=cached), 1024)  # type: ignore[arg-type]
    assert (wrong == "") == counts
