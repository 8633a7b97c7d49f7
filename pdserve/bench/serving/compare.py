"""The same load against several servers, in rounds: each is started anew for each round, so that all begin
cold, and every round has texts of its own and begins with another of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from statistics import median
from typing import Final

import msgspec

from pdserve.bench.serving.figures import Figures, Outcome, outcome_of
from pdserve.bench.serving.load import Load, Shape, make_load
from pdserve.bench.serving.run import Server, run_load

WARM_UP: Final = Shape(users=2, rounds=2, turn_tokens=200, output_tokens=8)
WARM_UP_SEED: Final = 1 << 40

Launch = Callable[[str, str], AbstractContextManager[str]]
"""(contender, size of the device's cache) to the URL of its cluster."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One contender in one round. `size`: of the device's cache, `small` or `large`."""

    size: str
    contender: str
    round: int
    outcome: Outcome


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the rounds; from the second turn on, and of the first, whose prompts nobody has seen.
    `*_over` are ratios to the first contender's.
    """

    size: str
    contender: str
    rounds: int
    failed: int
    first_turn_ms: float | None
    later_turns_ms: float | None
    later_p99_ms: float | None
    inter_token_ms: float | None
    prompt_tokens_s: float
    cached_share: float
    reusable_share: float
    first_turn_over: float | None = None
    later_turns_over: float | None = None
    prompt_tokens_s_over: float | None = None


def compare(
    contenders: Sequence[str],
    sizes: Sequence[str],
    rounds: int,
    shape: Shape,
    seed: int,
    launch: Launch,
    say: Callable[[str], None],
    *,
    concurrency: int,
    silence_s: float,
    limit_s: float = 0.0,
) -> Iterator[Measured]:
    """Each round of each size as it is measured; but for the first no round that, as long as those before
    it, would end after `limit_s` (0: none). Raises BenchError.
    """
    began_s = time.monotonic()
    for number in range(rounds):
        spent_s = time.monotonic() - began_s
        if number and limit_s and spent_s * (number + 1) / number > limit_s:
            say(
                f"{number} of {rounds} rounds: another would take longer than {limit_s / 60:g} minutes in all"
            )
            return
        for size in sizes:
            turn = number % len(contenders)
            for name in (*contenders[turn:], *contenders[:turn]):
                say(f"round {number + 1} of {rounds}, {size} device cache: starting {name}")
                with launch(name, size) as url:
                    server = Server(url, silence_s=silence_s)
                    run_load(server, make_load(WARM_UP, WARM_UP_SEED), lambda line: None, tag="warm-up")
                    load = make_load(shape, seed + number)
                    say(f"{name}: {len(load.asks)} asks")
                    run = run_load(server, load, say, concurrency=concurrency, lockstep=True)
                yield Measured(size=size, contender=name, round=number, outcome=outcome_of(run))


def summaries(measured: Sequence[Measured]) -> list[Summary]:
    """A summary for each contender and size, in the order they were measured."""
    found: list[Summary] = []
    first: dict[str, Summary] = {}
    contenders = dict.fromkeys(one.contender for one in measured if one.round == 0)
    for size in dict.fromkeys(one.size for one in measured):
        for name in contenders:
            mine = [one.outcome for one in measured if (one.size, one.contender) == (size, name)]
            if mine:
                alone = _summary(size, name, mine)
                found.append(_over(alone, first.setdefault(size, alone)))
    return found


def total_tokens(load: Load) -> int:
    """What all sessions have at their end: what a cache must hold to miss nothing."""
    return sum(session[-1].prompt_tokens + session[-1].output_tokens for session in load.sessions)


def _summary(size: str, name: str, outcomes: Sequence[Outcome]) -> Summary:
    firsts = [outcome.turns[0] for outcome in outcomes]
    later = [outcome.later or outcome.all for outcome in outcomes]

    def of(figures: Sequence[Figures], quantile: str) -> float | None:
        values = [getattr(one.first_token_ms, quantile) for one in figures]
        return _median([value for value in values if value is not None])

    gaps = [one.inter_token_ms.p50 for one in later if one.inter_token_ms.p50 is not None]
    return Summary(
        size=size,
        contender=name,
        rounds=len(outcomes),
        failed=sum(outcome.all.failed for outcome in outcomes),
        first_turn_ms=of(firsts, "p50"),
        later_turns_ms=of(later, "p50"),
        later_p99_ms=of(later, "p99"),
        inter_token_ms=_median(gaps),
        prompt_tokens_s=median(one.prompt_tokens_s for one in later),
        cached_share=median(one.cached_share for one in later),
        reusable_share=median(one.reusable_share for one in later),
    )


def _over(one: Summary, first: Summary) -> Summary:
    return msgspec.structs.replace(
        one,
        first_turn_over=_ratio(one.first_turn_ms, first.first_turn_ms),
        later_turns_over=_ratio(one.later_turns_ms, first.later_turns_ms),
        prompt_tokens_s_over=_ratio(one.prompt_tokens_s, first.prompt_tokens_s),
    )


def _median(values: Sequence[float]) -> float | None:
    return round(median(values), 2) if values else None


def _ratio(value: float | None, base: float | None) -> float | None:
    return round(value / base, 3) if value is not None and base else None
