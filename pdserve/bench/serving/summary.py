"""What contenders' runs come to: medians, and ratios to one of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

import msgspec
from msgspec.structs import replace

from pdserve.bench.serving.figures import Figures, Outcome


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One contender in one round of a load. `size`: of the device's cache, `small` or `large`."""

    load: str
    size: str
    contender: str
    round: int
    outcome: Outcome


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the rounds: of the first turn, whose prompts nobody has seen; from the second on, None
    where there is none; of all. Shares are of the prompts' tokens from turn 2 on; `storage_share`: what came
    from storage, None where the server never told. `*_over` are ratios to another contender's.
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
    cached_share: float
    storage_share: float | None
    reusable_share: float
    first_turn_over: float | None = None
    later_turns_over: float | None = None
    prompt_tokens_s_over: float | None = None


def summaries(measured: Sequence[Measured], base: str) -> list[Summary]:
    """A summary for each load, size and contender, in the order they were measured in first; ratios are over
    `base`, None where that was not measured.
    """
    found: dict[tuple[str, str, str], list[Outcome]] = {}
    for one in measured:
        found.setdefault((one.load, one.size, one.contender), []).append(one.outcome)
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
        first_turn_over=ratio(one.first_turn_ms, base.first_turn_ms),
        later_turns_over=ratio(one.later_turns_ms, base.later_turns_ms),
        prompt_tokens_s_over=ratio(one.prompt_tokens_s, base.prompt_tokens_s),
    )


def ratio(value: float | None, base: float | None) -> float | None:
    return round(value / base, 3) if value is not None and base else None


def _summary(load: str, size: str, name: str, outcomes: Sequence[Outcome]) -> Summary:
    firsts = [outcome.turns[0] for outcome in outcomes if outcome.turns]
    later = [outcome.later for outcome in outcomes if outcome.later is not None]
    everything = [outcome.all for outcome in outcomes]
    found = later or everything
    return Summary(
        load=load,
        size=size,
        contender=name,
        rounds=len(outcomes),
        failed=sum(figures.failed for figures in everything),
        first_turn_ms=_median(one.first_token_ms.p50 for one in firsts),
        later_turns_ms=_median(one.first_token_ms.p50 for one in later),
        later_p99_ms=_median(one.first_token_ms.p99 for one in later),
        all_turns_ms=_median(one.first_token_ms.p50 for one in everything),
        inter_token_ms=_median(one.inter_token_ms.p50 for one in everything),
        prompt_tokens_s=_median(one.prompt_tokens_s or None for one in later),
        cached_share=median(one.cached_share for one in found),
        storage_share=_median(map(_storage_share, found), 4),
        reusable_share=median(one.reusable_share for one in found),
    )


def _storage_share(figures: Figures) -> float | None:
    known = figures.cached.storage is not None and figures.prompt_tokens
    return (figures.cached.storage or 0) / figures.prompt_tokens if known else None


def _median(values: Iterable[float | None], digits: int = 2) -> float | None:
    known = [value for value in values if value is not None]
    return round(median(known), digits) if known else None
