"""Goals as a table: a row for each goal, a column for each kept run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from docs.generate.benchmarks.results import Run, met, spread
from docs.generate.markdown import table


class Goal(NamedTuple):
    """A bound on some figures of a run: at least `bound`, or at most it. `found` gives none where the run
    did not measure them.
    """

    text: str
    found: Callable[[Run], Sequence[float]]
    bound: float
    is_least: bool = True
    places: int = 2

    @property
    def words(self) -> str:
        return f"{self.text} {'≥' if self.is_least else '≤'} {self.bound:,g}"

    def holds(self, value: float) -> bool:
        """Whether the value keeps the bound."""
        return value >= self.bound if self.is_least else value <= self.bound


def goal_table(goals: Sequence[Goal], kept: Sequence[Run]) -> str:
    """The runs, newest first, with their machines; then the goals."""
    names = [f"{run.origin['date'][:16].replace('T', ' ')}, {run.origin['commit']}" for run in kept]
    machines = ["machine", *(run.origin["machine"].partition(" of ")[2] for run in kept), "", ""]
    return table(
        ("goal", *names, "met by the newest", "met by all"), [machines, *(_row(goal, kept) for goal in goals)]
    )


def _row(goal: Goal, kept: Sequence[Run]) -> Iterator[str]:
    yield goal.words
    all_found = [goal.found(run) for run in kept]
    yield from (spread(found, goal.places) if found else "-" for found in all_found)
    judged = [all(map(goal.holds, found)) for found in all_found if found]
    yield met(judged[0] if all_found[0] else None)
    yield met(all(judged) if judged else None)
