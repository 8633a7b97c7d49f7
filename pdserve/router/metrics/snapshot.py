"""All metrics of a moment as one value: told between processes, added up, shown as text. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from pdserve.metric import Labels, by_name
from pdserve.router.metrics.names import METRICS
from pdserve.router.metrics.stats import Histogram

BY_NAME: Final = by_name(METRICS)
STATES: Final = frozenset(
    f"worker_{state}" for state in ("healthy", "draining", "circuit_open", "refused", "prefills")
)
"""Gauges that are 0 or 1: of several processes the largest value counts. All other metrics add up."""


class Snapshot(msgspec.Struct):
    """By a metric's name in `names.METRICS`, then by the values of its labels."""

    values: dict[str, dict[Labels, float]] = {}
    """Counters and gauges."""
    histograms: dict[str, dict[Labels, Histogram]] = {}

    def value(self, name: str, *labels: str) -> int:
        """A counter or gauge that counts whole things; 0 where there is none."""
        return int(self.values.get(name, {}).get(labels, 0))

    def total(self, name: str) -> int:
        """The same, over all labels."""
        return int(sum(self.values.get(name, {}).values()))

    @property
    def is_whole(self) -> bool:
        """Every process of the router has answered in time."""
        return not self.value("processes_silent")


def add_up(snapshots: Iterable[Snapshot]) -> Snapshot:
    """The metrics of several processes as those of one router."""
    total = Snapshot()
    for one in snapshots:
        for name, values in one.values.items():
            sums = total.values.setdefault(name, {})
            for labels, value in values.items():
                before = sums.get(labels, 0.0)
                sums[labels] = max(before, value) if name in STATES else before + value
        for name, histograms in one.histograms.items():
            added = total.histograms.setdefault(name, {})
            for labels, histogram in histograms.items():
                added[labels] = added.get(labels, Histogram()) + histogram
    return total


def left_behind(snapshot: Snapshot) -> Snapshot:
    """What stays of a process that has ended: its counters and histograms, but no gauge."""
    counters = {name: of for name, of in snapshot.values.items() if BY_NAME[name].kind == "counter"}
    return Snapshot(counters, snapshot.histograms)
