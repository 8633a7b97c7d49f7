"""Counters on the hot path, snapshots of them, and their text form.

The router's metrics: plain counters on the hot path, copied into a `Snapshot` when asked for.

Counting is a dictionary increment; prometheus_client's own counters take a lock each and cost ten times
that. `names` lists the metrics, `exposition` shows them.

All metrics of a moment as one value: told between processes, added up, shown as text. Pure.

A snapshot in Prometheus' text form.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.metric import Definition, Labels, by_name
from pdserve.router.metrics.names import METRICS

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
MAX_PLACEMENTS: Final = 64
"""Label values of placements; policies of other packages may have any words."""


class Histogram(msgspec.Struct):
    """Observations in seconds: how many in each of `BUCKETS_S` and beyond, and their sum."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sum_s: float = 0.0

    def __add__(self, other: Histogram) -> Histogram:
        counts = [one + more for one, more in zip(self.counts, other.counts, strict=True)]
        return Histogram(counts, self.sum_s + other.sum_s)

    def observe(self, value_s: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(BUCKETS_S, value_s)] += 1
        self.sum_s += value_s

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus's form: (upper bound, observations at or below it)."""
        total, rows = 0, []
        for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), self.counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows


class Stats:
    """Counted since the start of this router."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.requests: defaultdict[Labels, int] = defaultdict(int)
        """(route, status); status `aborted`: the client left before there was one."""
        self.first_byte: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.first_token: defaultdict[str, Histogram] = defaultdict(Histogram)
        """By part, see `metric_names.PARTS`."""
        self.model_request: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.model_first_token: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.model_inter_token: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.turn_tokens: defaultdict[Labels, int] = defaultdict(int)
        """Prompt tokens by (turn, tier)."""
        self.placements: dict[Labels, int] = {}
        """By (role, reason)."""
        self.slo_streams: defaultdict[Labels, int] = defaultdict(int)
        """Streams by (model, what they kept)."""
        self.prefill: defaultdict[str, int] = defaultdict(int)
        self.direct: defaultdict[str, int] = defaultdict(int)
        self.settle: defaultdict[str, int] = defaultdict(int)
        self.pull_ahead: defaultdict[str, int] = defaultdict(int)
        self.decode_retries: defaultdict[str, int] = defaultdict(int)
        self.client_aborts: defaultdict[str, int] = defaultdict(int)
        """By the phase the request was in: body, settle, prefill, decode, stream."""
        self.stream_errors: defaultdict[str, int] = defaultdict(int)
        self.continued: defaultdict[str, int] = defaultdict(int)
        self.retries_refused = 0
        self.poisoned = 0
        self.nonces = 0
        """Prompts from which a line was taken out that changes with each request."""
        self.limits_apart = 0
        """1: Redis is away, and this process holds its part of the tenants' limits."""
        self.joins_refused = 0
        self.task_failures: defaultdict[str, int] = defaultdict(int)
        """By the background task that failed and began again: probes, discovery."""
        self.prompt_tokens = 0
        self.cached_tokens: defaultdict[str, int] = defaultdict(int)
        self.missing_pages = 0

    def on_placed(self, role: str, reason: str) -> None:
        """A worker of the role was chosen, or none was, for that reason."""
        key = role, reason
        if key not in self.placements and len(self.placements) >= MAX_PLACEMENTS:
            key = role, "other"
        self.placements[key] = self.placements.get(key, 0) + 1


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


def exposition(snapshot: Snapshot) -> bytes:
    """Every metric of `names.METRICS`, with the values it has."""
    registry = CollectorRegistry()
    registry.register(_Families(snapshot))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        return [_family(definition, self._snapshot) for definition in METRICS]


def _family(definition: Definition, snapshot: Snapshot) -> Metric:
    name, says, labels = definition.family_name, definition.says, definition.labels
    if definition.kind == "histogram":
        histograms = HistogramMetricFamily(name, says, labels=labels)
        for of, histogram in snapshot.histograms.get(definition.name, {}).items():
            histograms.add_metric(of, histogram.cumulative(), histogram.sum_s)
        return histograms
    make = CounterMetricFamily if definition.kind == "counter" else GaugeMetricFamily
    family = make(name, says, labels=labels)
    for of, value in snapshot.values.get(definition.name, {}).items():
        family.add_metric(of, value)
    return family
