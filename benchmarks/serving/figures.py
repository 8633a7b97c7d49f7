"""What a run took, from the records of its asks. Pure.

First-token time counts from the moment an ask was planned for, in the closed loop from when it was sent.
Throughput of a turn is its tokens over the time from its first ask to its last answer; but for lockstep
turns of several users overlap, and so do these times. A failed ask counts as failed only: its time would say
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Final

import msgspec
import numpy as np

from benchmarks.serving.load.records import Cached, Record, Run

CPU_BOUND: Final = 0.8  # of a core: beyond, the client measures itself
DELAY_SHARE: Final = 0.05  # of the median first-token time that the client itself may add, at p99
DELAY_FLOOR_S: Final = 0.005
PLACES: Final = ("device", "host", "storage", "ssd")


class Quantiles(msgspec.Struct, frozen=True):
    """In milliseconds; None where there was nothing to measure."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of some of a run's asks. Tokens per second of prompts (cached ones too) and of answers.
    `cached`: prompt tokens by place; `cached_share` and `reusable_share`: of the prompts' tokens, what was
    cached, and what a cache that forgets nothing would have had.
    """

    asks: int
    failed: int
    first_token_ms: Quantiles
    first_token_mean_ms: float | None = None
    """None: nothing was answered, or the lines are of an older run."""
    inter_token_ms: Quantiles
    asks_s: float
    prompt_tokens_s: float
    output_tokens_s: float
    prompt_tokens: int
    output_tokens: int
    cached: Cached
    cached_share: float
    reusable_share: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """`turns[i]` is turn i + 1; `later`: from turn 2 on, None where there is one turn only. `late_asks`: had
    to wait for the answer before them beyond their planned time. `warnings`: why not to trust the figures.
    """

    model: str
    wall_s: float
    all: Figures
    later: Figures | None
    turns: list[Figures]
    errors: dict[str, int]
    first_details: dict[str, str]
    late_asks: int
    client_cpu: float
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
    # apart: there are many more samples of the loop than asks
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
        late_asks=sum(record.due_s > record.planned_s + 1e-3 for record in records),
        client_cpu=round(run.client_cpu, 3),
        client_delay_p99_ms=round(delay_s * 1e3, 3),
        warnings=list(_warnings(run, whole, delay_s)),
    )


def figures_of(records: Sequence[Record]) -> Figures:
    """Of these asks alone."""
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
        asks=len(records),
        failed=len(records) - len(good),
        first_token_ms=quantiles_ms(first_s),
        first_token_mean_ms=round(1e3 * fmean(first_s), 2) if first_s else None,
        inter_token_ms=quantiles_ms([gap_s for record in good for gap_s in record.gaps_s]),
        asks_s=per_s(len(good)),
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
    if delay_s > max(DELAY_FLOOR_S, DELAY_SHARE * median_s):
        found.append(
            f"this client was late itself, by {delay_s * 1e3:.0f} ms at p99 (first token: median "
            f"{median_s * 1e3:.0f} ms): give it a processor of its own, or less to do"
        )
    short = sum(not record.error and record.output_tokens < record.asked_tokens for record in run.records)
    if short:
        found.append(f"{short} answers were shorter than asked for, or came without usage: others did more")
    return found
