"""Blocks of docs/benchmarks/serving.md: conversations beside other servers, rates, and parts of a request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from docs.generate.benchmarks.results import (
    NO_RUN,
    Run,
    alike,
    kinds,
    measured,
    met,
    origin,
    runs,
    weighed,
)
from docs.generate.markdown import table
from docs.generate.product import (
    RESULTS,
    GoalRow,
    Summary,
    Tried,
    best,
    goal_rows,
    summaries,
    times,
    weights_text,
)


def comparisons(
    results: Path = RESULTS, names: Sequence[str] | None = None
) -> list[tuple[Run, list[Summary]]]:
    """For each kind of comparison the kept runs of its newest command, and the summaries of its rounds.

    `names`: of the kinds; none: all.
    """
    if names is None:
        names = [name for name in reversed(kinds(results)) if name.startswith("compare-")]
    joined = [run for run in (alike(name, results) for name in names) if run is not None]
    return [(run, summaries(measured(run), run.origin["against"][0])) for run in joined]


def goal_list(results: Path = RESULTS, names: Sequence[str] | None = None) -> list[GoalRow]:
    """The rows of the goals, in the order of the comparisons."""
    return [row for _, found in comparisons(results, names) for row in goal_rows(found, _hop_ms(results))]


def goals(results: Path = RESULTS) -> str:
    """Each goal and what was measured."""
    rows = goal_list(results)
    if not rows:
        return NO_RUN
    cells = ((row.goal, row.load, row.contender, row.measured, met(row.met)) for row in rows)
    return table(("goal", "load", "server", "measured", "met"), cells)


def compared(results: Path = RESULTS) -> str:
    """Every comparison: its origin, and a table for each load."""
    parts: list[str] = []
    for run, found in comparisons(results):
        parts.append(f"### {run.files[0].rpartition('-20')[0]}\n\n{origin(run)}")
        for load in dict.fromkeys(one.load for one in found):
            rows = (_cells(one) for one in found if one.load == load)
            parts.append(f"Load: {load}.\n\n{table(_columns(run.origin['against'][0]), rows)}")
    return "\n".join(parts) or NO_RUN


def _columns(reference: str) -> tuple[str, ...]:
    over = f"over {reference}"
    return (
        *("device cache", "server", "rounds", "first token, turn 1, ms", over),
        *("first token from turn 2, ms", over, "prompt tokens/s from turn 2", over),
        *("cached, %", "from storage, %", "could be cached, %", "failed"),
    )


def _cells(one: Summary) -> tuple[str, ...]:
    return (
        *(one.size, one.contender, str(one.rounds)),
        *(_figure(one.first_turn_ms), times(one.first_turn_over)),
        *(_figure(one.later_turns_ms), times(one.later_turns_over)),
        *(_figure(one.prompt_tokens_s), times(one.prompt_tokens_s_over)),
        *map(_share, (one.cached_share, one.storage_share, one.reusable_share)),
        str(one.failed),
    )


def swept(results: Path = RESULTS) -> str:
    """The newest search for the highest rate."""
    kept = runs("sweep", results)
    if not kept:
        return NO_RUN
    run = kept[0]
    rates = sorted((line for line in run.lines if "rate_s" in line), key=lambda one: float(one["rate_s"]))
    chosen = best([msgspec.convert(rate, Tried) for rate in rates])
    highest = f"{chosen.rate_s:.3g} requests/s" if chosen else "none"
    columns = ("requests/s", "in time, %", "requests in time/s", "first token p50, ms", "p99, ms", "failed")
    rows = []
    for rate in rates:
        whole = rate["outcome"]["all"]
        first = whole["first_token_ms"]
        head = (f"{rate['rate_s']:.3g}", f"{100 * rate['in_time']:.0f}", f"{rate['goodput_s']:.3g}")
        rows.append((*head, _figure(first["p50"]), _figure(first["p99"]), str(whole["failed"])))
    said = f"Load: {run.origin['load']}. Highest rate that holds: {highest}."
    return f"{origin(run)}\n{said}\n\n{table(columns, rows)}"


def gaps(results: Path = RESULTS) -> str:
    """The newest run of `bench gaps`: time between the tokens of a stream, by what goes on beside it."""
    kept = runs("gaps", results)
    if not kept:
        return NO_RUN
    run = kept[0]
    columns = (
        *("server", "beside", "streams", "gaps", "mean, ms", "p50, ms", "p99, ms", "p99 / alone"),
        "first token of the other, p50, ms",
    )
    rows = [
        (
            *(line["contender"], line["beside"], str(line["streams"]), f"{line['gaps']:,}"),
            *(f"{line[name]:.1f}" for name in ("mean_ms", "p50_ms", "p99_ms")),
            *(f"{line['p99_over_alone']:.2f}", _figure(line["first_token_ms"])),
        )
        for line in run.lines
        if "p99_over_alone" in line
    ]
    return f"{origin(run)}\nLoad: {run.origin['load']}.\n\n{table(columns, rows)}"


def trial(results: Path = RESULTS) -> str:
    """The newest run of `pdserve trial`: two workers in different roles, measured and simulated."""
    kept = runs("trial", results)
    if not kept:
        return NO_RUN
    run = kept[0]
    columns = (
        *("workers", "rounds", "in time, %", "by quarter", "simulated, %", "by quarter"),
        *("first token late, %", "tokens slow, %", "changes of duty", "failed"),
    )
    rows = [
        (
            *(line["kind"], str(line["rounds"]) if line["rounds"] else "-"),
            *(_share(line["in_time"]), _quarters(line["in_time_by_part"])),
            *(_share(line["simulated"]), _quarters(line["simulated_by_part"])),
            *(_share(line["late"]), _share(line["slow"])),
            *(f"{line['duty_changes']:g}", str(line["failed"])),
        )
        for line in run.lines
        if line.get("what") == "kind"
    ]
    (rates,) = (line for line in run.lines if line.get("what") == "rates")
    said = (
        f"Load: {run.origin['load']}, lengths × {run.origin['scale']:g}. "
        f"A worker computes {1e3 / rates['prefill_ms_per_token']:,.0f} prompt tokens/s. A step takes "
        f"{rates['step_ms']:.0f} ms, and {rates['step_ms_per_request']:.0f} ms for each request. "
        f"A hand-over takes {rates['hop_ms']:.0f} ms, and {rates['pool_ms_per_token']:.2f} ms for each token."
    )
    return f"{origin(run)}\n{said}\n\n{table(columns, rows)}"


def parts(kind: str, results: Path = RESULTS) -> str:
    """The newest run of `weights` or `overlap`: where the time to the first token goes."""
    kept = runs(kind, results)
    if not kept:
        return NO_RUN
    run = kept[0]
    lines = [line for turn in weighed(run) for line in weights_text(turn)]
    return "\n".join((origin(run), f"Load: {run.origin['load']}.", "", *_fenced(lines)))


def _fenced(lines: list[str]) -> Iterator[str]:
    yield "```text"
    yield from lines
    yield "```\n"


def _hop_ms(results: Path) -> float | None:
    """From the end of the prefill until the decode worker has the pages, in a first turn."""
    kept = runs("weights", results)
    turns = weighed(kept[0]) if kept else []
    return turns[0].parts.get("publish", 0.0) + turns[0].parts.get("pull", 0.0) if turns else None


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _quarters(shares: list[float]) -> str:
    return " / ".join(f"{100 * share:.0f}" for share in shares)


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}"
