"""Metrics in Prometheus' text form. A router's parent process adds metrics up and imports none of this."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.metric import Definition
from pdserve.router.metrics.stats import METRICS, Snapshot


def exposition(snapshot: Snapshot) -> bytes:
    """Every metric of `METRICS`, with the values it has."""
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
