"""The highest rate of asks that a server answers in time, in the open loop: there a server that falls behind
shows.

A rate is met when at least `share` of its asks, failed ones counted as late, have their first token within
the limit. The search doubles from its start until a rate is not met (or halves until one is, or until rates
take too long), and then halves what lies between, in ratio, so many times. Pure but for `sweep` itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from benchmarks.serving.figures import Outcome, outcome_of
from benchmarks.serving.load.plan import Shape, make_load
from benchmarks.serving.load.records import Record
from benchmarks.serving.load.run import Say, Server, check_answers, run_load
from benchmarks.stores import BenchError

MAX_DOUBLINGS: Final = 12
MIN_ASKS: Final = 10
LONGEST_S: Final = 600.0
"""The search halves its rate no further than to ten asks in ten minutes: these hardly meet each other, and
are late by themselves. Each further rate would take twice the time.
"""


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """One rate. `in_time`: share of its asks; `goodput_s`: asks answered in time, per second."""

    rate_s: float
    in_time: float
    goodput_s: float
    met: bool
    outcome: Outcome


def sweep(
    server: Server,
    shape: Shape,
    seed: int,
    say: Say,
    *,
    limit_s: float,
    share: float,
    start_s: float,
    steps: int,
    seconds: float,
    time_limit_s: float = 0.0,
) -> Iterator[Tried]:
    """Each rate as it is tried; texts differ between rates. But for the first no rate is tried whose asks
    would come until after `time_limit_s` (0: none). Raises BenchError after a rate of which every ask failed,
    and once the server is lost.
    """
    tried: list[Tried] = []
    began_s = time.monotonic()
    while (rate_s := next_rate([(one.rate_s, one.met) for one in tried], start_s, steps)) is not None:
        load = make_load(shape_for(shape, rate_s, seconds), seed + len(tried), rate_s)
        ends_s = time.monotonic() - began_s + len(load.asks) / rate_s
        if tried and time_limit_s and ends_s > time_limit_s:
            say(f"{rate_s:.3g} asks/s is left out: it would take too long")
            return
        say(f"{rate_s:.3g} asks/s: {len(load.asks)} asks")
        run = run_load(server, load, say, tag=f"sweep-{seed}-{len(tried)}")
        outcome = outcome_of(run)
        tried.append(judged(rate_s, run.records, outcome, limit_s, share))
        yield tried[-1]
        if outcome.all.failed:
            check_answers(server)
        if outcome.all.failed == outcome.all.asks:
            kind, detail = next(iter(outcome.first_details.items()))
            raise BenchError(f"every ask failed at {rate_s:.3g} asks/s: {kind}: {detail}")


def next_rate(tried: Sequence[tuple[float, bool]], start_s: float, steps: int) -> float | None:
    """The rate to try after these (rate, whether it was met), or None at the end."""
    if not tried:
        return start_s
    met = [rate_s for rate_s, was_met in tried if was_met]
    missed = [rate_s for rate_s, was_met in tried if not was_met]
    if not met or not missed:
        if len(tried) > MAX_DOUBLINGS:
            return None
        if met:
            return 2 * max(met)
        lower = min(missed) / 2
        return lower if MIN_ASKS / lower <= LONGEST_S else None
    narrowed = len(tried) - _reached(tried)
    return math.sqrt(max(met) * min(missed)) if narrowed < steps and max(met) < min(missed) else None


def best(tried: Sequence[Tried]) -> Tried | None:
    """The highest rate that was met below all that were not."""
    missed = min((one.rate_s for one in tried if not one.met), default=math.inf)
    return max(
        (one for one in tried if one.met and one.rate_s < missed), key=lambda one: one.rate_s, default=None
    )


def shape_for(shape: Shape, rate_s: float, seconds: float) -> Shape:
    """So many users that their asks take about `seconds` to come."""
    asks = max(MIN_ASKS, rate_s * seconds)
    return msgspec.structs.replace(shape, users=max(1, math.ceil(asks / shape.rounds)))


def judged(rate_s: float, records: Sequence[Record], outcome: Outcome, limit_s: float, share: float) -> Tried:
    """What came of one rate."""
    in_time = sum(one.first_token_s is not None and one.first_token_s <= limit_s for one in records)
    span_s = max((one.done_s for one in records), default=0.0)
    part = in_time / len(records) if records else 0.0
    goodput_s = round(in_time / span_s, 4) if span_s else 0.0
    return Tried(
        rate_s=rate_s, in_time=round(part, 4), goodput_s=goodput_s, met=part >= share, outcome=outcome
    )


def _reached(tried: Sequence[tuple[float, bool]]) -> int:
    """How many were tried until there was one of both kinds."""
    return next(n for n in range(1, len(tried) + 1) if len({was_met for _, was_met in tried[:n]}) == 2)
