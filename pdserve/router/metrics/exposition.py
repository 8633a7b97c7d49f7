"""Counters as Prometheus families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.metric import Labels, by_name
from pdserve.router.metrics.names import METRICS
from pdserve.router.metrics.stats import Histogram

_BY_NAME: Final = by_name(METRICS)
V = TypeVar("V")


def samples(name: str, values: Mapping[Labels, float] | float) -> Metric:
    """The family of a counter or gauge; by labels, or the one value of a metric without."""
    definition = _BY_NAME[name]
    family_type = CounterMetricFamily if definition.kind == "counter" else GaugeMetricFamily
    family = family_type(definition.family_name, definition.says, labels=definition.labels)
    for labels, value in list(values.items()) if isinstance(values, Mapping) else [((), values)]:
        family.add_metric(labels, value)
    return family


def histograms(name: str, values: Mapping[Labels, Histogram]) -> Metric:
    """The family of a histogram, by labels."""
    definition = _BY_NAME[name]
    family = HistogramMetricFamily(definition.family_name, definition.says, labels=definition.labels)
    for labels, histogram in list(values.items()):
        family.add_metric(labels, histogram.cumulative(), histogram.sum_s)
    return family


def keyed(values: Mapping[str, V]) -> dict[Labels, V]:
    """With the key as the only label."""
    return {(key,): value for key, value in list(values.items())}


def make_registry(*collectors: Collector) -> CollectorRegistry:
    """A registry of this router alone."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return registry
