"""A run's figures as tables and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from rich.table import Table

from benchmarks.plot import picture
from benchmarks.serving.figures import Figures, Outcome
from benchmarks.serving.report.goals import times
from benchmarks.serving.summary import Summary
from benchmarks.serving.sweep import Tried
from benchmarks.tables import table

CONTENDER_COLOURS = {
    "plain": "#b0b0b0",
    "file": "#d9822b",
    "mooncake": "#b45f9b",
    "agg": "#6fa8dc",
    "agg-once": "#9fd3c7",
    "disagg": "#1f5fa8",
    "disagg-direct": "#123a68",
    "agg-two": "#8fb98a",
    "elastic": "#3d7a4e",
    "dead": "#303030",
    "dynamo": "#76b900",
    "dynamo-disagg": "#4c7700",
    "vllm": "#c9b8dd",
    "vllm-cpu": "#a58cc4",
    "vllm-disk": "#7d5fa3",
    "vllm-pool": "#3f2a63",
}
FEW: Final = 100  # a p99 of fewer lies between the largest two
COLUMNS = (
    *("turn", "asks", "failed", "first token p50", "p90", "p99 ms", "inter-token p50", "p99 ms"),
    *("prompt tokens/s", "answer tokens/s", "cached", "device", "host", "pool DRAM", "pool SSD", "could be"),
)
PLACES = {
    "device": ("device", "#1f5fa8"),
    "host": ("host", "#6fa8dc"),
    "dram": ("pool DRAM", "#d9822b"),
    "ssd": ("pool SSD", "#8a4f1d"),
}


def turns_table(outcome: Outcome, title: str) -> Table:
    """A row for each turn, for all turns, and for those from the second on."""
    return table(title, COLUMNS, ((name, *_cells(figures)) for name, figures in _rows(outcome)))


def remarks(outcome: Outcome) -> Iterator[str]:
    """What to know besides, a line each."""
    for kind, count in outcome.errors.items():
        detail = outcome.first_details.get(kind, "")
        yield f"failed, {kind}: {count}" + (f" (the first: {detail})" if detail else "")
    if outcome.late_asks:
        yield f"{outcome.late_asks} asks were due before the answer to their session's last one; that counts"
    yield (
        f"client: {outcome.client_cpu:.0%} of a core, late by {outcome.client_delay_p99_ms:.1f} ms at p99; "
        f"whole run {outcome.wall_s:.1f} s"
    )
    if 0 < (answered := outcome.all.asks - outcome.all.failed) < FEW:
        yield f"{answered} answers: p99 is about their maximum"
    for warning in outcome.warnings:
        yield f"WARNING: {warning}"


def plot_turns(path: Path, outcome: Outcome, title: str) -> None:
    """First-token time, throughput and cached tokens by turn, as a PNG."""
    numbers = list(range(1, len(outcome.turns) + 1))
    with picture(path, 1, 3, title, figsize=(15, 4.5)) as axes:
        left, middle, right = axes[0]
        for name, style in (("p50", "-o"), ("p90", "--^"), ("p99", ":s")):
            values = [getattr(turn.first_token_ms, name) for turn in outcome.turns]
            known = [(n, v) for n, v in zip(numbers, values, strict=True) if v is not None]
            left.plot(*zip(*known, strict=True), style, label=name, color="#1f5fa8") if known else None
        left.set_title("first token, ms", loc="left")
        left.legend(frameon=False)
        middle.bar(numbers, [turn.prompt_tokens_s for turn in outcome.turns], color="#6fa8dc")
        middle.set_title("prompt tokens/s, cached ones too", loc="left")
        below = [0.0] * len(numbers)
        for place, (label, colour) in PLACES.items():
            shares = [_share(turn, place) for turn in outcome.turns]
            right.bar(numbers, shares, bottom=below, label=label, color=colour)
            below = [a + b for a, b in zip(below, shares, strict=True)]
        right.plot(numbers, [100 * turn.reusable_share for turn in outcome.turns], "k_", label="could be")
        right.set_title("prompt tokens found cached, %", loc="left")
        right.legend(frameon=False)
        for axis in axes[0]:
            axis.set_xlabel("turn")
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.set_ylim(bottom=0)


def summaries_table(found: Sequence[Summary], title: str) -> Table:
    """Medians of the contenders, and how they compare with the first."""
    columns = (
        *("device cache", "contender", "first token, turn 1, ms", "over", "from turn 2", "over", "p99"),
        *("inter-token", "prompt tokens/s from turn 2", "over", "cached", "could be", "failed"),
    )
    rows = (
        (
            *(one.size, one.contender),
            *(_ms(one.first_turn_ms), times(one.first_turn_over)),
            *(_ms(one.later_turns_ms), times(one.later_turns_over), _ms(one.later_p99_ms)),
            *(_ms(one.inter_token_ms), _ms(one.prompt_tokens_s), times(one.prompt_tokens_s_over)),
            *(_percent(one.cached_share), _percent(one.reusable_share), str(one.failed or "-")),
        )
        for one in found
    )
    return table(title, columns, rows, left=columns[:2])


def plot_summaries(path: Path, found: Sequence[Summary], title: str) -> None:
    """First-token time of turn 1 and later, and throughput, a row of panels for each load, as a PNG."""
    panels = {
        "first_turn_ms": "first token, turn 1, ms",
        "later_turns_ms": "first token, from turn 2, ms",
        "prompt_tokens_s": "prompt tokens/s, from turn 2",
    }
    loads = list(dict.fromkeys(one.load for one in found))
    with picture(path, len(loads), 3, title, figsize=(14, 1 + 3.8 * len(loads))) as rows:
        for load, axes in zip(loads, rows, strict=True):
            mine = [one for one in found if one.load == load]
            labels = [f"{one.contender}\n{one.size}" for one in mine]
            colours = [CONTENDER_COLOURS.get(one.contender, "#b0b0b0") for one in mine]
            for axis, (name, label) in zip(axes, panels.items(), strict=True):
                bars = axis.bar(range(len(mine)), [getattr(one, name) or 0.0 for one in mine], color=colours)
                axis.bar_label(bars, fmt="%.0f", fontsize=8, padding=1)
                axis.set_xticks(range(len(mine)), labels, fontsize=7)
                axis.set_title(label, loc="left", fontsize=10)
            axes[0].set_ylabel(load.replace(", scale", "\nscale"), fontsize=9)


def sweep_table(tried: Sequence[Tried], best: Tried | None, title: str) -> Table:
    """The rates in ascending order, and which of them is the highest that was met."""
    columns = (
        *("asks/s", "in time", "goodput/s", "first token p50", "p90", "p99 ms", "cached", "failed"),
        *("client late ms", ""),
    )
    rows = []
    for one in sorted(tried, key=lambda each: each.rate_s):
        first, whole = one.outcome.all.first_token_ms, one.outcome.all
        row = (
            *(f"{one.rate_s:.3g}", f"{one.in_time:.1%}", f"{one.goodput_s:.3g}"),
            *map(_ms, (first.p50, first.p90, first.p99)),
            *(f"{whole.cached_share:.0%}", str(whole.failed or "-")),
            f"{one.outcome.client_delay_p99_ms:.1f}",
            "best" if one is best else "met" if one.met else "MISS",
        )
        rows.append(row)
    return table(title, columns, rows)


def plot_sweep(path: Path, tried: Sequence[Tried], limit_ms: float, title: str) -> None:
    """First-token time with its limit, and goodput, over the rate, as a PNG."""
    rows = sorted(tried, key=lambda one: one.rate_s)
    rates = [one.rate_s for one in rows]
    with picture(path, 1, 2, title, figsize=(12, 4.5)) as axes:
        left, right = axes[0]
        for name, style in (("p50", "-o"), ("p90", "--^")):
            values = [getattr(one.outcome.all.first_token_ms, name) or float("nan") for one in rows]
            left.plot(rates, values, style, label=name, color="#1f5fa8")
        left.axhline(limit_ms, color="#b04a4a", linewidth=1, label="limit")
        left.set_title("first token, ms", loc="left")
        left.set_yscale("log")
        for format_ in (left.yaxis.set_major_formatter, left.yaxis.set_minor_formatter):
            format_("{x:,.0f}")
        right.plot(rates, [one.goodput_s for one in rows], "-o", color="#1f5fa8", label="in time")
        right.plot(rates, rates, ":", color="#b0b0b0", label="asked")
        right.set_title("asks per second answered in time", loc="left")
        for axis in axes[0]:
            axis.legend(frameon=False)
            axis.set_xlabel("asks per second")
            axis.set_xscale("log")
            axis.set_xticks(rates, [f"{rate:.3g}" for rate in rates], minor=False)
            axis.set_xticks([], minor=True)


def _rows(outcome: Outcome) -> Iterator[tuple[str, Figures]]:
    if len(outcome.turns) > 1:
        yield from ((str(number), turn) for number, turn in enumerate(outcome.turns, 1))
    yield "all", outcome.all
    if outcome.later is not None:
        yield "from 2", outcome.later


def _cells(figures: Figures) -> Iterator[str]:
    yield from (str(figures.asks), str(figures.failed or "-"))
    first, between = figures.first_token_ms, figures.inter_token_ms
    yield from map(_ms, (first.p50, first.p90, first.p99, between.p50, between.p99))
    yield from (f"{figures.prompt_tokens_s:,.0f}", f"{figures.output_tokens_s:,.1f}")
    yield f"{figures.cached_share:.1%}"
    for place in PLACES:
        known = getattr(figures.cached, place) is not None
        yield f"{_share(figures, place):.1f}" if known else "?"
    yield f"{figures.reusable_share:.1%}"


def _share(figures: Figures, place: str) -> float:
    """Of the prompts' tokens, %."""
    tokens = getattr(figures.cached, place) or 0
    return 100 * tokens / figures.prompt_tokens if figures.prompt_tokens else 0.0


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
