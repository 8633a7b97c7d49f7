"""From a node's snapshot to its Prometheus metrics. Pure but for prometheus_client's own objects.

The number of label values is bounded: the first `max_namespaces` namespaces have their names, the others
share `(other)`, and a name once given stays for as long as the namespace is there, so that no counter falls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from pdserve.kvpool.node.metrics.meter import BUCKETS_S, NO_NAMESPACE, Series
from pdserve.kvpool.node.metrics.names import METRICS, PREFIX
from pdserve.kvpool.protocol.cluster_messages import ACTIVE, DEAD, LEAVING, LEFT
from pdserve.kvpool.protocol.messages import NamespaceStatus, StatusReport

OTHER: Final = "(other)"
NONE: Final = ""  # label of requests that name no namespace


# counters of StatusReport that have a name of their own; all others are `events`
_NODE_COUNTERS: Final = {
    "discarded": "checksum_failures",
    "reservations_expired": "reservations_expired",
    "leases_expired": "leases_expired",
    "pages_pulled": "pulled_pages",
    "bytes_pulled": "pulled_bytes",
    "pulls_failed": "pulls_failed",
    "requests_held_back": "requests_held_back",
    "requests_overloaded": "requests_overloaded",
    "requests_failed": "requests_failed",
}
_NODE_GAUGES: Final = {
    "tail_bytes": "tail_bytes",
    "sweeping_bytes": "sweeping_bytes",
    "kept_bytes": "kept_bytes",
    "recovered_pages": "recovered_pages",
    "dropped_rows": "dropped_rows",
    "replica_bytes": "replica_bytes",
    "pages_to_move": "pages_to_move",
    "moving": "moving",
    "requests_waiting": "requests_waiting",
}
_TOLD_ELSEWHERE: Final = ("replicas", "settled_epoch")
_SPACE_COUNTERS: Final = ("read_bytes", "written_bytes", "written_pages")
_SPACE_TOLD_ELSEWHERE: Final = ("operations", "hits_below")
_EVICTED: Final = "evicted_"  # prefix of a namespace's counters by reason
_STATUS_NAMES: Final = {ACTIVE: "active", LEAVING: "leaving", LEFT: "left", DEAD: "dead"}

Labels = tuple[str, ...]
Sample = tuple[str, Labels, float]


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """A node at one moment. `series` is by name of the request and number of the namespace."""

    report: StatusReport
    series: Mapping[tuple[str, int], Series]
    namespace_names: Mapping[int, str]
    lag: Series
    sockets: int


@dataclass(slots=True)
class Labeller:
    """Gives namespaces their label, and keeps counters of `(other)` from falling when a namespace is dropped:
    Prometheus takes a counter that falls for one that began again at 0, and counts its whole value once more.
    """

    max_namespaces: int
    _named: set[str] = field(default_factory=set)
    _present: set[str] = field(default_factory=set)
    _last: dict[tuple[str, Labels], dict[str, float]] = field(default_factory=dict)
    _gone: dict[tuple[str, Labels], float] = field(default_factory=dict)

    def see(self, names: Iterable[str]) -> None:
        """Take note of all present namespaces."""
        earlier = self._present
        in_order = list(names)
        self._present = set(in_order)
        self._named &= self._present
        room = self.max_namespaces - len(self._named)
        self._named.update([name for name in in_order if name not in earlier][:room])

    def label(self, name: str) -> str:
        """Its own name, or `(other)`."""
        return name if name in self._named or name == NONE else OTHER

    def other(self, metric: str, labels: Labels, by_name: Mapping[str, float]) -> float:
        """The sum of a counter over namespaces without a label, dropped ones included. `labels` are
        those beside the namespace.
        """
        key = (metric, labels)
        last = self._last.get(key, {})
        gone = sum(value for name, value in last.items() if name not in by_name)
        self._gone[key] = self._gone.get(key, 0.0) + gone
        self._last[key] = dict(by_name)
        return sum(by_name.values()) + self._gone[key]

    def counters(self) -> Iterable[tuple[str, Labels]]:
        """Every counter that was ever counted under `(other)`."""
        return list(self._last)


def families(snapshot: NodeSnapshot | None, labeller: Labeller) -> Iterator[Metric]:
    """All metrics; of a node that did not answer, that alone."""
    if snapshot is None:
        yield GaugeMetricFamily(PREFIX + "responding", METRICS[0].says, value=0)
        return
    labeller.see(space.name for space in snapshot.report.namespaces)
    values = _values(snapshot, labeller)
    for definition in METRICS:
        if definition.kind != "histogram":
            family_type = CounterMetricFamily if definition.kind == "counter" else GaugeMetricFamily
            family = family_type(PREFIX + definition.name, definition.says, labels=definition.labels)
            for labels, value in values.get(definition.name, {}).items():
                family.add_metric(labels, value)
            yield family
    yield from _histograms(snapshot, labeller)


def _values(snapshot: NodeSnapshot, labeller: Labeller) -> dict[str, dict[Labels, float]]:
    """By metric and labels. Of namespaces without a label, gauges and counters are added up."""
    values: dict[str, dict[Labels, float]] = {}
    unlabelled: dict[tuple[str, Labels], dict[str, float]] = {}
    counters = {definition.name for definition in METRICS if definition.kind == "counter"}
    for name, labels, value in _of_node(snapshot):
        values.setdefault(name, {})[labels] = value
    for space in (*_of_namespaces(snapshot), *_of_operations(snapshot)):
        name, (namespace, *rest), value = space
        if labeller.label(namespace) == OTHER:
            by_name = unlabelled.setdefault((name, tuple(rest)), {})
            by_name[namespace] = by_name.get(namespace, 0.0) + value
        else:
            values.setdefault(name, {})[namespace, *rest] = value
    for key in labeller.counters():
        unlabelled.setdefault(key, {})
    for (name, rest_labels), by_name in unlabelled.items():
        total = labeller.other(name, rest_labels, by_name) if name in counters else sum(by_name.values())
        values.setdefault(name, {})[OTHER, *rest_labels] = total
    return values


def _of_node(snapshot: NodeSnapshot) -> Iterator[Sample]:
    report = snapshot.report
    yield "responding", (), 1
    yield "node_info", (report.node,), 1
    yield "uptime_seconds", (), report.uptime_s
    for state in ("free", "used", "reserved", "quarantined"):
        yield "memory_bytes", (state,), getattr(report, f"{state}_bytes")
    yield "pins", (), report.pins
    yield "waits", (), report.waiters
    yield "connections", (), report.connections
    yield "sockets", (), snapshot.sockets
    for name, count in report.counters.items():
        if name in _NODE_GAUGES:
            yield _NODE_GAUGES[name], (), count
        elif name in _NODE_COUNTERS:
            yield _NODE_COUNTERS[name], (), count
        elif name not in _TOLD_ELSEWHERE:
            yield "events", (name,), count
    for tier in report.tiers:
        labels = (tier.name, tier.kind)
        yield "tier_capacity_bytes", labels, tier.capacity_bytes
        yield "tier_used_bytes", labels, tier.used_bytes
        yield "tier_pages", labels, tier.pages
        yield "tier_writable", labels, tier.writable
        for name, count in tier.counters.items():
            yield "tier_events", (tier.name, name), count
    yield from _of_cluster(report)


def _of_cluster(report: StatusReport) -> Iterator[Sample]:
    yield "epoch", (), report.epoch
    statuses = [member.status for member in report.members]
    for status, name in _STATUS_NAMES.items():
        yield "members", (name,), statuses.count(status)
    for member in report.members:
        if member.node == report.node:
            yield "settled", (), member.settled >= report.epoch


def _of_namespaces(snapshot: NodeSnapshot) -> Iterator[Sample]:
    for space in snapshot.report.namespaces:
        name = space.name
        yield "hits", (name,), space.hits
        yield "misses", (name,), space.misses
        below = space.counters.get("hits_below", 0)
        yield "found_pages", (name, "dram"), space.hits - below
        yield "found_pages", (name, "below"), below
        yield "pages", (name, "dram"), space.pages
        yield "page_bytes", (name, "dram"), space.page_bytes
        yield "pages", (name, "below"), space.tier_pages
        yield "page_bytes", (name, "below"), space.tier_bytes
        yield "slot_bytes", (name,), space.slot_bytes
        yield "replicas", (name,), space.replicas
        if space.settings.quota_bytes:
            yield "quota_bytes", (name,), space.settings.quota_bytes
        yield from _counted(space)


def _counted(space: NamespaceStatus) -> Iterator[Sample]:
    """`evictions` is all of them; those without a reason of their own were for room."""
    told = {
        reason.removeprefix(_EVICTED): n
        for reason, n in space.counters.items()
        if reason.startswith(_EVICTED)
    }
    for reason, count in {"room": space.evictions - sum(told.values()), **told}.items():
        yield "evictions", (space.name, reason), count
    for name, count in space.counters.items():
        if name in _SPACE_COUNTERS:
            yield name, (space.name,), count
        elif name not in _SPACE_TOLD_ELSEWHERE and not name.startswith(_EVICTED):
            yield "namespace_events", (space.name, name), count


def _of_operations(snapshot: NodeSnapshot) -> Iterator[Sample]:
    for (operation, number), series in snapshot.series.items():
        name = _name_of(snapshot, number)
        yield "operations", (name, operation, "ok"), sum(series.counts) - series.refused
        yield "operations", (name, operation, "refused"), series.refused


def _histograms(snapshot: NodeSnapshot, labeller: Labeller) -> Iterator[Metric]:
    by_name = {definition.name: definition for definition in METRICS}
    latency = by_name["operation_seconds"]
    family = HistogramMetricFamily(PREFIX + latency.name, latency.says, labels=latency.labels)
    sums: dict[Labels, Series] = {}
    for (operation, number), series in snapshot.series.items():
        # what is under `(other)` falls when one of its namespaces goes: Prometheus takes that for a restart
        labels: Labels = (labeller.label(_name_of(snapshot, number)), operation)
        sums.setdefault(labels, Series()).add(series)
    for labels, series in sums.items():
        family.add_metric(labels, _cumulative(series), series.sum_s)
    yield family
    lag = by_name["event_loop_lag_seconds"]
    yield HistogramMetricFamily(
        PREFIX + lag.name, lag.says, buckets=_cumulative(snapshot.lag), sum_value=snapshot.lag.sum_s
    )


def _name_of(snapshot: NodeSnapshot, number: int) -> str:
    return NONE if number == NO_NAMESPACE else snapshot.namespace_names.get(number, NONE)


def _cumulative(series: Series) -> list[tuple[str, float]]:
    """Prometheus's form: (upper bound, observations at or below it)."""
    total, rows = 0, []
    for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), series.counts, strict=True):
        total += count
        rows.append((bound, float(total)))
    return rows
