"""Figures of a run from the records of its requests, and of contenders over rounds: medians and ratios. Pure.

The time to the first token counts from the moment a request was planned for, in the closed loop from when it
was sent. Throughput of a turn is its tokens over the time from its first request to its last answer; except
in lockstep, turns of several users overlap, and so do these times. A failed request counts as failed only.

A ratio between contenders is the median of the rounds' own ratios. In a round the contenders take turns
within minutes, so what else the machine does concerns them alike; between rounds it may change more than they
differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Final

import msgspec
import numpy as np

from benchmarks.lib.load import Cached, Record, Run

OTHERS: Final = 0.1  # of a core: beyond, the machine was not the benchmark's alone
CPU_BOUND: Final = 0.8  # of a core: beyond, the client measures itself
DELAY_SHARE: Final = 0.05  # of the median first-token time that the client itself may add, at p99
DELAY_FLOOR_S: Final = 0.005
PLACES: Final = ("device", "host", "storage")


class Quantiles(msgspec.Struct, frozen=True):
    """In milliseconds; None where there was nothing to measure."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of some of a run's requests. Tokens per second of prompts (cached ones too) and of answers.
    `cached`: prompt tokens by place; `cached_share` and `reusable_share`: of the prompts' tokens, what was
    cached, and what a cache that forgets nothing would have had.
    """

    requests: int
    failed: int
    first_token_ms: Quantiles
    first_token_mean_ms: float | None = None
    """None: nothing was answered."""
    inter_token_ms: Quantiles
    requests_s: float
    prompt_tokens_s: float
    output_tokens_s: float
    prompt_tokens: int
    output_tokens: int
    cached: Cached
    cached_share: float
    reusable_share: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """`turns[i]` is turn i + 1; `later`: from turn 2 on, None where there is one turn only. `late_requests`:
    had to wait for the answer before them beyond their planned time. `warnings`: why not to trust the
    figures.
    """

    model: str
    wall_s: float
    all: Figures
    later: Figures | None
    turns: list[Figures]
    errors: dict[str, int]
    first_details: dict[str, str]
    late_requests: int
    client_cpu: float
    others_cpu: float = 0.0
    client_delay_p99_ms: float
    warnings: list[str]


def outcome_of(run: Run) -> Outcome:
    """All of a run's figures."""
    records = run.records
    last = max((record.turn for record in records), default=0)
    later = [record for record in records if record.turn > 1]
    errors = Counter(record.error for record in records if record.error)
    details = {record.error: record.detail for record in reversed(records) if record.error}
    late_s = [record.sent_s - record.due_s for record in records]
    # apart: there are many more samples of the loop than requests
    delay_s = max(
        (float(np.percentile(each_s, 99)) for each_s in (late_s, run.lags_s) if each_s), default=0.0
    )
    whole = figures_of(records)
    return Outcome(
        model=run.model,
        wall_s=round(run.wall_s, 3),
        all=whole,
        later=figures_of(later) if later else None,
        turns=[figures_of([one for one in records if one.turn == turn + 1]) for turn in range(last)],
        errors=dict(errors.most_common()),
        first_details=details,
        late_requests=sum(record.due_s > record.planned_s + 1e-3 for record in records),
        client_cpu=round(run.client_cpu, 3),
        others_cpu=round(run.others_cpu, 3),
        client_delay_p99_ms=round(delay_s * 1e3, 3),
        warnings=list(_warnings(run, whole, delay_s)),
    )


def figures_of(records: Sequence[Record]) -> Figures:
    """Of these requests alone."""
    good = [record for record in records if not record.error]
    begin_s = min((record.planned_s for record in records), default=0.0)
    span_s = max((record.done_s for record in good), default=begin_s) - begin_s
    prompt = sum(record.prompt_tokens for record in good)
    output = sum(record.output_tokens for record in good)
    cached = sum(record.cached.total for record in good)
    first_s = [record.first_token_s for record in good if record.first_token_s is not None]

    def per_s(count: float) -> float:
        return round(count / span_s, 3) if span_s > 0 else 0.0

    return Figures(
        requests=len(records),
        failed=len(records) - len(good),
        first_token_ms=quantiles_ms(first_s),
        first_token_mean_ms=round(1e3 * fmean(first_s), 2) if first_s else None,
        inter_token_ms=quantiles_ms([gap_s for record in good for gap_s in record.gaps_s]),
        requests_s=per_s(len(good)),
        prompt_tokens_s=per_s(prompt),
        output_tokens_s=per_s(output),
        prompt_tokens=prompt,
        output_tokens=output,
        cached=Cached(cached, *(_place(good, name) for name in PLACES)),
        cached_share=round(cached / prompt, 4) if prompt else 0.0,
        reusable_share=round(sum(r.reusable_tokens for r in good) / prompt, 4) if prompt else 0.0,
    )


def quantiles_ms(values_s: Sequence[float]) -> Quantiles:
    """p50, p90 and p99, linear between two values."""
    if not values_s:
        return Quantiles()
    return Quantiles(*(round(float(np.percentile(values_s, at)) * 1e3, 2) for at in (50, 90, 99)))


def _place(records: Sequence[Record], name: str) -> int | None:
    """The tokens found in one place, None where the server never told."""
    told = [getattr(record.cached, name) for record in records]
    return sum(value or 0 for value in told) if any(value is not None for value in told) else None


def _warnings(run: Run, whole: Figures, delay_s: float) -> list[str]:
    found = []
    median_s = (whole.first_token_ms.p50 or 0.0) / 1e3
    if run.client_cpu > CPU_BOUND:
        found.append(f"this client kept {run.client_cpu:.0%} of a core busy: it may be what is measured")
    if run.others_cpu > OTHERS:
        found.append(f"other processes took {run.others_cpu:.0%} of a core meanwhile")
    if delay_s > max(DELAY_FLOOR_S, DELAY_SHARE * median_s):
        found.append(
            f"this client was late itself, by {delay_s * 1e3:.0f} ms at p99 (first token: median "
            f"{median_s * 1e3:.0f} ms): give it a processor of its own, or less to do"
        )
    short = sum(not record.error and record.output_tokens < record.asked_tokens for record in run.records)
    if short:
        found.append(f"{short} answers were shorter than asked for, or came without usage: others did more")
    return found


def remarks(outcome: Outcome) -> Iterator[str]:
    """What to know besides, a line each."""
    for kind, count in outcome.errors.items():
        detail = outcome.first_details.get(kind, "")
        yield f"failed, {kind}: {count}" + (f" (the first: {detail})" if detail else "")
    if outcome.late_requests:
        yield f"{outcome.late_requests} requests were due before their session's last answer; that counts"
    yield (
        f"client: {outcome.client_cpu:.0%} of a core, late by {outcome.client_delay_p99_ms:.1f} ms at p99; "
        f"whole run {outcome.wall_s:.1f} s"
    )
    for warning in outcome.warnings:
        yield f"WARNING: {warning}"


# --- contenders over rounds


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One contender in one round of a load. `size`: of the device's cache, `small` or `large`."""

    load: str
    size: str
    contender: str
    round: int
    outcome: Outcome


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a contender: medians over the rounds. None: nothing was answered."""

    first_token_ms: float | None
    cached_share: float | None
    reusable_share: float | None


def by_turn(measured: Sequence[Measured], load: str, size: str) -> dict[str, list[Turn]]:
    """The turns of each contender at one load with one size of the device's cache."""
    rounds: dict[str, list[Sequence[Figures]]] = {}
    for one in measured:
        if (one.load, one.size) == (load, size):
            rounds.setdefault(one.contender, []).append(one.outcome.turns)
    return {
        name: [
            Turn(
                first_token_ms=_median(one.first_token_ms.p50 for one in its),
                cached_share=_median((one.cached_share for one in its), 4),
                reusable_share=_median((one.reusable_share for one in its), 4),
            )
            for its in zip(*all_turns, strict=False)
        ]
        for name, all_turns in rounds.items()
    }


RATIOS: Final = ("first_turn_ms", "later_turns_ms", "all_turns_ms", "prompt_tokens_s")


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the rounds: of the first turn, whose prompts nobody has seen; of the turns from the second
    on, None where there are none; of all. Shares are of the prompts' tokens of the turns from the second on;
    `storage_share`: what came from storage, None where the server never told. `over`: ratios of RATIOS to the
    first contender.
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
    over: dict[str, float | None] = {}


def summaries(measured: Sequence[Measured], base: str) -> list[Summary]:
    """One for each load, size and contender, in the order measured; ratios are over the contender `base`."""
    found: dict[tuple[str, str, str], dict[int, Outcome]] = {}
    for one in measured:
        found.setdefault((one.load, one.size, one.contender), {})[one.round] = one.outcome
    return [
        _summary(*which, outcomes, found.get((which[0], which[1], base), {}))
        for which, outcomes in found.items()
    ]


def _summary(
    load: str, size: str, name: str, by_round: Mapping[int, Outcome], base: Mapping[int, Outcome]
) -> Summary:
    outcomes = list(by_round.values())
    rounds = {number: _round(outcome) for number, outcome in by_round.items()}
    base_rounds = {number: _round(outcome) for number, outcome in base.items()}
    later = [outcome.later for outcome in outcomes if outcome.later is not None]
    everything = [outcome.all for outcome in outcomes]
    found = [figures for figures in later or everything if figures.prompt_tokens]
    return Summary(
        load=load,
        size=size,
        contender=name,
        rounds=len(outcomes),
        failed=sum(figures.failed for figures in everything),
        **{figure: _median(one[figure] for one in rounds.values()) for figure in RATIOS},
        later_p99_ms=_median(one.first_token_ms.p99 for one in later),
        inter_token_ms=_median(one.inter_token_ms.p50 for one in everything),
        cached_share=_median((one.cached_share for one in found), 4),
        storage_share=_median(map(_storage_share, found), 4),
        reusable_share=_median((one.reusable_share for one in found), 4),
        over={figure: _ratio(rounds, base_rounds, figure) for figure in RATIOS},
    )


def _round(outcome: Outcome) -> dict[str, float | None]:
    """RATIOS of one round; None where nothing was answered, or there is no such turn."""
    later = outcome.later
    return {
        "first_turn_ms": outcome.turns[0].first_token_ms.p50 if outcome.turns else None,
        "later_turns_ms": None if later is None else later.first_token_ms.p50,
        "all_turns_ms": outcome.all.first_token_ms.p50,
        "prompt_tokens_s": None if later is None else later.prompt_tokens_s or None,
    }


def _ratio(
    rounds: Mapping[int, Mapping[str, float | None]],
    base: Mapping[int, Mapping[str, float | None]],
    figure: str,
) -> float | None:
    """The median over the rounds that both have."""
    pairs = [(one[figure], base[number][figure]) for number, one in rounds.items() if number in base]
    return _median((mine / theirs for mine, theirs in pairs if mine is not None and theirs), 3)


def _storage_share(figures: Figures) -> float | None:
    known = figures.cached.storage is not None and figures.prompt_tokens
    return (figures.cached.storage or 0) / figures.prompt_tokens if known else None


def _median(values: Iterable[float | None], digits: int = 2) -> float | None:
    known = [value for value in values if value is not None]
    return round(median(known), digits) if known else None
