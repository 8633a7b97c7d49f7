"""The report of a check: a table for people, and JSON lines. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from benchmarks.gpu_check.checks import GROUPS, Result


def markdown(origin: Mapping[str, Any], results: Sequence[Result]) -> str:
    """One row for each check."""
    shows = {check.name: check.shows for group in GROUPS for check in group.checks}
    counts = {kind: sum(one.outcome == kind for one in results) for kind in ("passed", "failed", "skipped")}
    rows = [
        f"| {one.check} | {one.outcome} | {one.seconds:.1f} | {shows[one.check]} | {_cell(one.says)} |"
        for one in results
    ]
    return "\n".join(
        [
            "# GPU check",
            "",
            f"{origin.get('date', '')}, commit {origin.get('commit') or 'unknown'}: "
            + ", ".join(f"{count} {kind}" for kind, count in counts.items()),
            "",
            "| check | outcome | s | shows | says |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def json_lines(origin: Mapping[str, Any], results: Sequence[Result]) -> bytes:
    """The origin, then each result."""
    return msgspec.json.Encoder().encode_lines([dict(origin), *results])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
