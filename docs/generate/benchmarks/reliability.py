"""Blocks of docs/benchmarks/reliability.md: a quiet namespace beside a loud one; hostile connections; hosts
that fail.
"""

from __future__ import annotations

from typing import Any

import msgspec

from docs.generate.benchmarks.results import NO_RUN, Run, met, origin, runs
from docs.generate.markdown import table
from docs.generate.product import HOSTILE_MEMORY, HOSTILE_P99, QUIET_GOAL, HostsFigures

COLUMNS = (
    *("commit", "data path", "neighbour", "limit MB/s", "asked / limit", "p99 alone, ms", "beside / alone"),
    *("load on another node / alone", f"beside ≤ {QUIET_GOAL}"),
)


def quiet() -> str:
    """All kept runs, the newest first."""
    kept = runs("quiet")
    if not kept:
        return NO_RUN
    rows = [_cells(run, line) for run in kept for line in run.lines]
    origins = "\n".join(f"Run of {run.origin['commit']}:\n\n{origin(run)}" for run in kept)
    return f"{origins}\n{table(COLUMNS, rows)}"


def hostile() -> str:
    """The newest run."""
    kept = runs("hostile")
    if not kept:
        return NO_RUN
    run = kept[0]
    columns = (
        *("port", "connections", "honest", "requests", "missed", "p99, ms", "p99 / alone", "memory / alone"),
        *("crashes", f"p99 ≤ {HOSTILE_P99}, memory ≤ {HOSTILE_MEMORY}"),
    )
    rows = [_hostile_cells(line) for line in run.lines]
    return origin(run) + "\n" + table(columns, rows)


def hosts() -> str:
    """All kept runs, the newest first."""
    return "\n".join(map(_hosts, runs("hosts"))) or NO_RUN


def host_events() -> str:
    """What clients saw of each fault in the newest run that had it."""
    newest: dict[str, tuple[Run, dict[str, Any]]] = {}
    for run in reversed(runs("hosts")):
        newest |= {line["fault"]: (run, line) for line in run.lines}
    if not newest:
        return NO_RUN
    columns = ("event", "turns", "failed", "wrong answers", "longest turn, s", "hit rate", "failed after")
    rows = [
        (
            f"{line['fault']}: {line['what']}",
            *(str(line[name]) for name in ("turns", "failed", "wrong_answers", "longest_s")),
            f"{line['hit']:.0%}, then {line['hit_after']:.0%}",
            str(line["failed_after"]),
        )
        for _, line in newest.values()
    ]
    dates = " and ".join(sorted({run.origin["date"][:10] for run, _ in newest.values()}))
    commits = ", ".join(dict.fromkeys(run.origin["commit"] for run, _ in newest.values()))
    said = f"`python -m benchmarks hosts`, {dates}, {commits}; the newest run of each:\n\n"
    return said + table(columns, rows)


def _hosts(run: Run) -> str:
    columns = (
        *("fault", "seconds", "turns", "failed", "first token p50, ms", "p99, ms", "longest turn, s"),
        *("hit rate", "moved", "failed after", "hit rate after", "as it must be"),
    )
    paths = " and ".join(dict.fromkeys(line["path"].upper() for line in run.lines))
    waiting = run.origin["load_before"][0]
    said = f"- Between hosts pages went by {paths}. Before the run {waiting:.0f} processes ran or waited.\n\n"
    return origin(run) + said + table(columns, [_hosts_cells(line) for line in run.lines])


def _hosts_cells(line: dict[str, Any]) -> tuple[str, ...]:
    row = msgspec.convert(line, HostsFigures)
    fault, turns, *more = row.cells
    return (f"{fault}: {row.what}", f"{row.seconds:.0f}", turns, *more, met(row.passed))


def _hostile_cells(line: dict[str, Any]) -> tuple[str, ...]:
    """Runs before 2026-11-25 were of strangers at one port and of gets, and a crash ended them."""
    who = line.get("who", line.get("kind"))
    good = line["p99_over_alone"] <= HOSTILE_P99 and line["memory_over_alone"] <= HOSTILE_MEMORY
    crashes = line.get("crashes", 0)
    return (
        line.get("port", "pool: control"),
        f"{line['connections']:,} of {who}" if line["connections"] else "none",
        *(line.get("honest", "get"), str(line.get("requests", line.get("gets"))), str(line["missed"])),
        *(f"{line['p99_us'] / 1e3:.2f}", f"{line['p99_over_alone']:.2f}", f"{line['memory_over_alone']:.2f}"),
        *(str(crashes), met(good and not line["missed"] and not crashes)),
    )


def _cells(run: Run, line: dict[str, Any]) -> tuple[str, ...]:
    """Runs before 2026-11-26 were all beside a tenant."""
    limit = line["limit_bytes_s"]
    asked = [phase["asked_bytes_s"] for phase in line["phases"] if phase["neighbour"] == "here"]
    had = min(phase["loud_bytes_s"] for phase in line["phases"] if phase["neighbour"] == "here")
    return (
        run.origin["commit"],
        line["path"],
        {"tenant": "a tenant", "weights": "a model load"}[line.get("loud", "tenant")],
        f"{limit / 1e6:.0f}" if limit else "none",
        f"{min(asked) / limit:.0f} ×" if limit else f"{had / 1e9:.1f} GB/s read",
        f"{line['alone_p99_us'] / 1e3:.2f}",
        f"{line['ratio']:.2f}",
        f"{line['control']:.2f}",
        met(line["ratio"] <= QUIET_GOAL and not any(phase["missed"] for phase in line["phases"])),
    )
