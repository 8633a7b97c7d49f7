"""The metrics of several router processes as those of one router.

Counters, histograms and most gauges (requests in flight, open connections, sessions) add up. What says how a
worker is seen (healthy, refused, circuit open) is no amount: the largest is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

GROWING = frozenset(("counter", "histogram"))
"""Types of what a process that has ended leaves behind: what it counted has happened."""
LARGEST = frozenset(
    f"pdserve_router_worker_{what}" for what in ("healthy", "draining", "circuit_open", "refused")
)


class _Summed(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def add_up(texts: Iterable[str], types: frozenset[str] | None = None) -> bytes:
    """One exposition of the given ones, of all types or those, in Prometheus' text form. Raises ValueError
    for what is none.
    """
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            if types is not None and family.type not in types:
                continue
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            found = values.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, tuple(sample.labels.items())
                before = found.get(key)
                if before is None:
                    found[key] = sample.value
                elif family.name in LARGEST:
                    found[key] = max(before, sample.value)
                else:
                    found[key] = before + sample.value
    for name, family in families.items():
        for (sample_name, labels), value in values[name].items():
            family.add_sample(sample_name, dict(labels), value)
    registry = CollectorRegistry()
    registry.register(_Summed(list(families.values())))
    return generate_latest(registry)
