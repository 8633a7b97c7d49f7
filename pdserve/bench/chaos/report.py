"""The figures as a table for people, and as JSON for programs."""

from __future__ import annotations

from typing import Any

import msgspec
from rich import box
from rich.table import Table

from pdserve.bench.chaos.run import Outcome


def table(outcome: Outcome) -> Table:
    plan = outcome.replay.plan
    done, planned = outcome.carried_out, outcome.faults
    faults = f"{done} faults" if done == planned else f"{done} of {planned} faults"
    title = f"Chaos: seed {plan.seed}, {plan.minutes:g} minutes, {plan.nodes} nodes, {faults}"
    drawn = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    if outcome.starved_s:
        drawn.caption = f"Not judged: {outcome.starved_s:.0f} s in which a node waited for a processor."
    for name in ("", "figure", "goal", "seen", ""):
        drawn.add_column(name)
    for row in outcome.rows:
        drawn.add_row(row.number, row.what, row.goal, row.figure, row.verdict)
    return drawn


def plain(outcome: Outcome) -> dict[str, Any]:
    """For JSON."""
    whole: dict[str, Any] = msgspec.to_builtins(outcome)
    return {**whole, "passed": outcome.passed}
