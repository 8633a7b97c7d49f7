"""What a comparison was to reach, and what it reached: the serving table of the goals. Pure.

| measured with | goal |
|---|---|
| `small`: sessions larger than the device's cache, from turn 2 on | tokens/s ≥ 3.7 × plain SGLang's |
| the same | time to the first token ≤ 0.33 × plain SGLang's |
| the same | time to the first token ≤ 0.8 × that of SGLang with its file backend |
| nothing cached | first token: disaggregated ≤ 1.05 × aggregated, plus the hop through the pool |
| nothing cached | first token: aggregated ≤ 1.03 × plain SGLang, the cost of having asked the pool |
| nothing cached | first token: with a pool that is dead ≤ 1.05 × plain SGLang (R13) |
| `large`: sessions that fit the device's cache | none, there is nothing to be won |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from benchmarks.serving.contenders import DEAD, OURS
from benchmarks.serving.summary import Summary, of, ratio

THROUGHPUT: Final = 3.7
FIRST_TOKEN: Final = 0.33
OVER_FILE: Final = 0.8
COLD: Final = 1.05
BUSY_P50: Final = 1.3
BUSY_MEAN: Final = 1.1
MISS: Final = 1.03
GONE: Final = 1.05
WORTH_SAYING: Final = 2 * THROUGHPUT  # what a load allows at most, by its tokens


class Row(msgspec.Struct, frozen=True):
    """`met`: None where there is no goal, or what it speaks of was not what happened."""

    goal: str
    load: str
    contender: str
    measured: str
    met: bool | None


def goal_rows(found: Sequence[Summary], hop_ms: float | None) -> list[Row]:
    """A row for each goal and each load and contender it was measured with. `hop_ms`: from the end of the
    prefill until the decode worker has its pages; None: not measured.
    """
    found = [one for one in found if one.all_turns_ms is not None]
    ours = [one for one in found if one.contender in OURS]
    reusing = [one for one in ours if one.reusable_share]
    small = [one for one in reusing if one.size == "small"]
    dead = [one for one in found if one.contender == DEAD]
    return [
        *(row for one in small for row in _over_plain(one, found)),
        *(row for one in small for row in _over_file(one, found)),
        *(row for one in ours if one.reusable_share == 0 for row in _cold(one, found, hop_ms)),
        *(row for one in dead if one.reusable_share == 0 for row in _gone(one, found)),
        *(row for one in reusing if one.size == "large" for row in _fitting(one, found)),
        *(row for one in ours if " requests/s" in one.load for row in _at_a_rate(one, found)),
    ]


def _over_plain(one: Summary, found: Sequence[Summary]) -> Iterator[Row]:
    plain = of(found, one.load, one.size, "plain")
    if plain is None:
        return
    rate, first = _rate_and_first(one, plain)
    what = f"from turn 2, over plain: tokens/s ≥ {THROUGHPUT} ×"
    share = one.reusable_share or 0.0
    bound = 1 / (1 - share) if share < 1 else None
    most = f" (all reused: about {bound:.1f} ×)" if bound and bound < WORTH_SAYING else ""
    yield _row(what, one, plain, times(rate) + most, rate is not None and rate >= THROUGHPUT)
    what = f"from turn 2, over plain: first token ≤ {FIRST_TOKEN} ×"
    yield _row(what, one, plain, times(first), _at_most(first, FIRST_TOKEN))


def _over_file(one: Summary, found: Sequence[Summary]) -> Iterator[Row]:
    file = of(found, one.load, one.size, "file")
    if file is None:
        return
    first = ratio(one, file, "later_turns_ms")
    from_storage = " / ".join(f"{100 * (each.storage_share or 0):.0f}" for each in (one, file))
    what = f"from turn 2, over the file backend: first token ≤ {OVER_FILE} ×"
    measured = f"{times(first)} (from storage: {from_storage} %)"
    mostly = all((each.storage_share or 0) >= (each.cached_share or 0) / 2 for each in (one, file))
    met = _at_most(first, OVER_FILE) if mostly else None
    yield _row(what, one, file, measured, met)


def _cold(one: Summary, found: Sequence[Summary], hop_ms: float | None) -> Iterator[Row]:
    if one.contender == "disagg" and (agg := of(found, one.load, one.size, "agg")) is not None:
        cold, whole = (ratio(one, agg, "all_turns_ms", less_ms) for less_ms in (hop_ms or 0.0, 0.0))
        what = f"nothing cached, over agg: first token ≤ {COLD} × plus the hop"
        hop = "the hop's time unknown" if hop_ms is None else f"{times(cold)} less {hop_ms:.0f} ms of hop"
        yield _row(what, one, agg, f"{times(whole)}; {hop}", _at_most(cold, COLD))
    if one.contender == "agg" and (plain := of(found, one.load, one.size, "plain")) is not None:
        asked = ratio(one, plain, "all_turns_ms")
        what = f"nothing cached, over plain: having asked, first token ≤ {MISS} ×"
        yield _row(what, one, plain, times(asked), _at_most(asked, MISS))


def _gone(one: Summary, found: Sequence[Summary]) -> Iterator[Row]:
    if (plain := of(found, one.load, one.size, "plain")) is not None:
        first = ratio(one, plain, "all_turns_ms")
        what = f"nothing cached, the pool dead, over plain: first token ≤ {GONE} ×"
        yield _row(what, one, plain, times(first), _at_most(first, GONE))


def _fitting(one: Summary, found: Sequence[Summary]) -> Iterator[Row]:
    plain = of(found, one.load, one.size, "plain")
    if plain is None:
        return
    rate, first = _rate_and_first(one, plain)
    what = "the device's cache holds all: from turn 2, over plain, tokens/s and first token"
    yield _row(what, one, plain, f"{times(rate)}, {times(first)}", None)


def _at_a_rate(one: Summary, found: Sequence[Summary]) -> Iterator[Row]:
    """Two workers that share processors with each other, beside one."""
    agg = of(found, one.load, one.size, "agg")
    if one.contender != "disagg" or agg is None:
        return
    median, mean = ratio(one, agg, "all_turns_ms"), ratio(one, agg, "mean_ms")
    what = "requests at random times, over agg: first token"
    yield _row(f"{what}, median ≤ {BUSY_P50} ×", one, agg, times(median), _at_most(median, BUSY_P50))
    yield _row(f"{what}, mean ≤ {BUSY_MEAN} ×", one, agg, times(mean), _at_most(mean, BUSY_MEAN))


def _row(goal: str, one: Summary, other: Summary, measured: str, met: bool | None) -> Row:
    """Where asks failed, of either, those that were answered prove nothing."""
    if one.failed or other.failed:
        failed = f"{one.failed} asks of {one.contender}, {other.failed} of {other.contender}"
        return Row(goal, one.load, one.contender, f"{measured}; failed: {failed}", None)
    return Row(goal, one.load, one.contender, measured, met)


def _rate_and_first(one: Summary, plain: Summary) -> tuple[float | None, float | None]:
    """From turn 2 on, over plain: tokens/s, and time to the first token."""
    return ratio(one, plain, "prompt_tokens_s"), ratio(one, plain, "later_turns_ms")


def _at_most(value: float | None, bound: float) -> bool:
    return value is not None and value <= bound


def times(value: float | None) -> str:
    """A ratio for people."""
    return "-" if value is None else f"{value:.2f} ×"
