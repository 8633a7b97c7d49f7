"""What contenders' runs come to: medians, and ratios to one of them. Pure.

A ratio is the median of the rounds' own ratios. In a round the contenders take turns within minutes, and
what else the machine has to do concerns them alike; from one round to another, let alone one day to another,
it may change by more than they differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Literal

import msgspec
from msgspec.structs import replace

from benchmarks.serving.figures import Figures, Outcome


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One contender in one round of a load. `size`: of the device's cache, `small` or `large`."""

    load: str
    size: str
    contender: str
    round: int
    outcome: Outcome


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """What ratios are made of, of one round; None where nothing was answered, or no turn is such."""

    first_turn_ms: float | None
    later_turns_ms: float | None
    all_turns_ms: float | None
    mean_ms: float | None = None
    """Of all turns; the others are medians."""
    prompt_tokens_s: float | None
    """From turn 2 on."""


Figure = Literal["first_turn_ms", "later_turns_ms", "all_turns_ms", "mean_ms", "prompt_tokens_s"]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the rounds: of the first turn, whose prompts nobody has seen; from the second on, None
    where there is none; of all. Shares are of the prompts' tokens from turn 2 on, None where none were
    answered; `storage_share`: what came from storage, None where the server never told, too. `*_over` are
    ratios to another contender's.
    """

    load: str
    size: str
    contender: str
    rounds: int
    failed: int
    first_turn_ms: float | None
    later_turns_ms: float | None
    later_p99_ms: float | None
    all_turns_ms: float | None
    inter_token_ms: float | None
    prompt_tokens_s: float | None
    cached_share: float | None
    storage_share: float | None
    reusable_share: float | None
    by_round: dict[int, Round]
    first_turn_over: float | None = None
    later_turns_over: float | None = None
    prompt_tokens_s_over: float | None = None


def summaries(measured: Sequence[Measured], base: str) -> list[Summary]:
    """A summary for each load, size and contender, in the order they were measured in first; ratios are over
    `base`, None where that was not measured.
    """
    found: dict[tuple[str, str, str], dict[int, Outcome]] = {}
    for one in measured:
        found.setdefault((one.load, one.size, one.contender), {})[one.round] = one.outcome
    alone = [_summary(*which, outcomes) for which, outcomes in found.items()]
    return [over(one, of(alone, one.load, one.size, base)) for one in alone]


def of(found: Sequence[Summary], load: str, size: str, contender: str) -> Summary | None:
    """The one of this load, size and contender."""
    which = (load, size, contender)
    return next((one for one in found if (one.load, one.size, one.contender) == which), None)


def over(one: Summary, base: Summary | None) -> Summary:
    """With ratios over `base`."""
    if base is None:
        return replace(one, first_turn_over=None, later_turns_over=None, prompt_tokens_s_over=None)
    return replace(
        one,
        first_turn_over=ratio(one, base, "first_turn_ms"),
        later_turns_over=ratio(one, base, "later_turns_ms"),
        prompt_tokens_s_over=ratio(one, base, "prompt_tokens_s"),
    )


def ratio(one: Summary, base: Summary, figure: Figure, less: float = 0.0) -> float | None:
    """The median, over the rounds that both have, of the one's figure, `less` taken off, over the base's."""
    found = []
    for number, mine in one.by_round.items():
        theirs = base.by_round.get(number)
        value, other = getattr(mine, figure), None if theirs is None else getattr(theirs, figure)
        if value is not None and other:
            found.append((value - less) / other)
    return _median(found, 3)


def _round(outcome: Outcome) -> Round:
    later = outcome.later
    return Round(
        first_turn_ms=outcome.turns[0].first_token_ms.p50 if outcome.turns else None,
        later_turns_ms=None if later is None else later.first_token_ms.p50,
        all_turns_ms=outcome.all.first_token_ms.p50,
        mean_ms=outcome.all.first_token_mean_ms,
        prompt_tokens_s=None if later is None else later.prompt_tokens_s or None,
    )


def _summary(load: str, size: str, name: str, by_round: Mapping[int, Outcome]) -> Summary:
    outcomes = list(by_round.values())
    rounds = {number: _round(outcome) for number, outcome in by_round.items()}
    later = [outcome.later for outcome in outcomes if outcome.later is not None]
    everything = [outcome.all for outcome in outcomes]
    found = [figures for figures in later or everything if figures.prompt_tokens]
    return Summary(
        load=load,
        size=size,
        contender=name,
        rounds=len(outcomes),
        failed=sum(figures.failed for figures in everything),
        first_turn_ms=_median(one.first_turn_ms for one in rounds.values()),
        later_turns_ms=_median(one.later_turns_ms for one in rounds.values()),
        later_p99_ms=_median(one.first_token_ms.p99 for one in later),
        all_turns_ms=_median(one.all_turns_ms for one in rounds.values()),
        inter_token_ms=_median(one.inter_token_ms.p50 for one in everything),
        prompt_tokens_s=_median(one.prompt_tokens_s for one in rounds.values()),
        cached_share=_median((one.cached_share for one in found), 4),
        storage_share=_median(map(_storage_share, found), 4),
        reusable_share=_median((one.reusable_share for one in found), 4),
        by_round=rounds,
    )


def _storage_share(figures: Figures) -> float | None:
    known = figures.cached.storage is not None and figures.prompt_tokens
    return (figures.cached.storage or 0) / figures.prompt_tokens if known else None


def _median(values: Iterable[float | None], digits: int = 2) -> float | None:
    known = [value for value in values if value is not None]
    return round(median(known), digits) if known else None
