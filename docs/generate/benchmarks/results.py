"""The kept raw lines: one file for each run, its first line the run's origin."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from docs.generate.product import RESULTS, Measured, Weights

ROUNDS_OF_A_RUN = 1000  # more than any run has
NO_RUN = "No run is kept yet.\n"


class Run(NamedTuple):
    """One run: where its figures come from, and its lines."""

    origin: dict[str, Any]
    lines: list[dict[str, Any]]
    files: tuple[str, ...]


def runs(kind: str, results: Path = RESULTS) -> list[Run]:
    """All kept runs of a kind, the newest first. A file may hold several runs, each with its origin line."""
    found: list[Run] = []
    for path in results.glob(f"{kind}-[0-9]*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            if "command" in line and "date" in line:
                found.append(Run(line, [], (path.name,)))
            elif found:
                found[-1].lines.append(line)
    return sorted(found, key=lambda run: str(run.origin["date"]), reverse=True)


def kinds(results: Path = RESULTS) -> list[str]:
    """The kinds of which runs are kept."""
    return sorted({kind_of(path.name) for path in results.glob("*.jsonl")})


def kind_of(name: str) -> str:
    """The kind of a file of results: its name up to the date."""
    return re.sub(r"-\d{4}-\d{2}-\d{2}.*", "", name)


def alike(kind: str, results: Path = RESULTS) -> Run | None:
    """The newest run of a kind, joined with the earlier runs of the same command on the same machine. Each
    run's rounds get numbers of their own. None where no run is kept.
    """
    kept = runs(kind, results)
    if not kept:
        return None
    newest = kept[0].origin
    same = [run for run in kept if all(run.origin[name] == newest[name] for name in ("command", "machine"))]
    dates = " and ".join(sorted({run.origin["date"][:10] for run in same}))
    commits = ", ".join(dict.fromkeys(run.origin["commit"] for run in reversed(same)))
    lines = [
        {**line, "round": number * ROUNDS_OF_A_RUN + line["round"]} if "round" in line else line
        for number, run in enumerate(same)
        for line in run.lines
    ]
    files = tuple(file for run in reversed(same) for file in run.files)
    return Run({**newest, "date": dates, "commit": commits}, lines, files)


def measured(run: Run) -> list[Measured]:
    """The rounds of a comparison."""
    return [msgspec.convert(line, Measured) for line in run.lines if "outcome" in line]


def weighed(run: Run) -> list[Weights]:
    """The turns of `bench weights`."""
    return [msgspec.convert(line, Weights) for line in run.lines if "parts" in line]


def origin(run: Run) -> str:
    """Command, date, commit, machine and raw lines of a run, as a list."""
    one = run.origin
    versions = _versions(one.get("versions", {}))
    others = [f"; in {name}: {_versions(found)}" for name, found in one.get("environments", {}).items()]
    lines = [
        f"- Command: `{one['command']}`",
        f"- Date and commit: {one['date'][:10] if 'T' in one['date'] else one['date']}, {one['commit']}",
        f"- Machine: {one.get('machine') or 'not kept'}",
        *([f"- Versions: {versions}{''.join(others)}"] if versions else []),
        f"- Raw lines: {', '.join(f'`benchmarks/results/{name}`' for name in run.files)}",
    ]
    return "\n".join(lines) + "\n"


def _versions(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items() if version)


def met(value: bool | None) -> str:
    """A verdict as a table shows it."""
    return {True: "yes", False: "**no**", None: "-"}[value]


def spread(values: Sequence[float], places: int = 2) -> str:
    """One value, or the least and the largest."""
    low, high = min(values), max(values)
    texts = list(dict.fromkeys((f"{low:.{places}f}", f"{high:.{places}f}")))
    return " to ".join(texts)
