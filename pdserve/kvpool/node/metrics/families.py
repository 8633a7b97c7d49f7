"""From a node's snapshot to its Prometheus metrics. Pure but for prometheus_client's own objects.

A counter of `StatusReport` becomes the metric of its name where there is one, else an event of that name.
`METRICS` is the whole list.

A hit rate is a quotient of two: hits over hits and misses, each as `rate(...[5m])`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from pdserve.kvpool.namespaces.tenants import split
from pdserve.kvpool.node.metrics.meter import BUCKETS_S, NO_NAMESPACE, Series
from pdserve.kvpool.protocol.cluster_messages import ACTIVE, DEAD, LEAVING, LEFT
from pdserve.kvpool.protocol.messages import NamespaceStatus, StatusReport
from pdserve.metric import Definition, by_name

PREFIX: Final = "pdserve_pool_"

_OF_NAMESPACE = ("namespace",)
METRICS: Final = (
    Definition("node_info", "gauge", ("node",), "1; names the node."),
    Definition("uptime_seconds", "gauge", (), "Time since the start of this process."),
    Definition(
        "operations",
        "counter",
        ("namespace", "operation", "outcome"),
        "Requests by message and outcome (ok, refused).",
    ),
    Definition(
        "operation_seconds",
        "histogram",
        ("namespace", "operation"),
        "Time from a request's arrival to its answer, including its time in the queue.",
    ),
    Definition("hits", "counter", _OF_NAMESPACE, "Requested pages that were found."),
    Definition(
        "misses",
        "counter",
        _OF_NAMESPACE,
        "Requested pages that were not found, or that exceeded the limit of pins.",
    ),
    Definition("read_bytes", "counter", _OF_NAMESPACE, "Bytes of found pages."),
    Definition(
        "found_pages",
        "counter",
        ("namespace", "place"),
        "Hits by place of the page: dram, or below (a tier) and loaded to memory.",
    ),
    Definition("written_bytes", "counter", _OF_NAMESPACE, "Bytes of committed pages."),
    Definition("written_pages", "counter", _OF_NAMESPACE, "Committed pages."),
    Definition("evictions", "counter", ("namespace", "reason"), "Evicted pages, by reason."),
    Definition("pages", "gauge", ("namespace", "place"), "Pages by place: dram, or below (all tiers)."),
    Definition("page_bytes", "gauge", ("namespace", "place"), "Bytes of those pages."),
    Definition(
        "slot_bytes",
        "gauge",
        _OF_NAMESPACE,
        "Memory in slots, including reservations. The quota limits this figure.",
    ),
    Definition("quota_bytes", "gauge", _OF_NAMESPACE, "Quota of memory; absent if there is none."),
    Definition(
        "tenant_bytes",
        "gauge",
        ("tenant", "place"),
        "Bytes of a tenant's pages of all models: dram, slots included; below: in tiers. Of the largest "
        "tenants; the others together are `(others)`.",
    ),
    Definition("replicas", "gauge", _OF_NAMESPACE, "Replicas of other nodes' pages."),
    Definition(
        "namespace_events", "counter", ("namespace", "event"), "Other events of a namespace, by kind."
    ),
    Definition(
        "memory_bytes",
        "gauge",
        ("state",),
        "Bytes of the arena by state: free, used, reserved, quarantined. Their sum is the capacity.",
    ),
    Definition("tail_bytes", "gauge", (), "Remainders of slabs, too small for a slot; part of free."),
    Definition("pins", "gauge", (), "Leases of readers on pages."),
    Definition("waits", "gauge", (), "Open `Wait` requests."),
    Definition("connections", "gauge", (), "Clients with a completed handshake."),
    Definition("sockets", "gauge", (), "All open sockets, including those before the handshake."),
    Definition("checksum_failures", "counter", (), "Pages dropped because a reader found them damaged."),
    Definition("reservations_expired", "counter", (), "Reservations that were not committed in time."),
    Definition("leases_expired", "counter", (), "Leases that readers did not release in time."),
    Definition("requests_waiting", "gauge", (), "Requests that wait in the fair queue of namespaces."),
    Definition("requests_held_back", "counter", (), "Requests that had to wait in the fair queue."),
    Definition("requests_overloaded", "counter", (), "Requests that waited for too long in that queue."),
    Definition(
        "requests_failed",
        "counter",
        (),
        "Requests that met an unexpected error, which cost their clients their connections. Above 0: a bug.",
    ),
    Definition("pushed_pages", "counter", (), "Pages pushed to the nodes that own them now."),
    Definition("pushed_bytes", "counter", (), "Bytes of those pages."),
    Definition("pushes_failed", "counter", (), "Pages that could not be pushed; they are tried again."),
    Definition("kept_bytes", "gauge", (), "Slots of pages that clients want kept for a while."),
    Definition("sweeping_bytes", "gauge", (), "Slots of dropped pages that are still being freed."),
    Definition("recovered_pages", "gauge", (), "Pages taken over from the previous process."),
    Definition("dropped_rows", "gauge", (), "Damaged rows of the slot table at the start."),
    Definition("events", "counter", ("event",), "Other events of the node, by kind."),
    Definition("tier_capacity_bytes", "gauge", ("tier", "kind"), "Size of a tier."),
    Definition("tier_used_bytes", "gauge", ("tier", "kind"), "Used bytes of a tier."),
    Definition("tier_pages", "gauge", ("tier", "kind"), "Pages in the tier."),
    Definition(
        "tier_writable", "gauge", ("tier", "kind"), "1: the tier accepts writes; 0: writing to it has failed."
    ),
    Definition("tier_events", "counter", ("tier", "event"), "Events of a tier, by kind."),
    Definition("epoch", "gauge", (), "Epoch of the ring, as known to this node."),
    Definition("members", "gauge", ("status",), "Nodes known to this node, by status."),
    Definition("moving", "gauge", (), "1: this node has pages that others own, or looks for them."),
    Definition(
        "pages_to_move",
        "gauge",
        (),
        "Pages that this node has still to push, as far as it has found them.",
    ),
    Definition("replica_bytes", "gauge", (), "Memory taken by replicas of other nodes' pages."),
    Definition("settled", "gauge", (), "1: nothing is left on this node that others own."),
    Definition("event_loop_lag_seconds", "histogram", (), "Lateness of the event loop for a timer, sampled."),
)

NONE: Final = ""  # label of requests that name no namespace
MOST_TENANTS: Final = 50  # with labels of their own
OTHERS: Final = "(others)"

_METRICS: Final = by_name(METRICS)
_RENAMED: Final = {
    "discarded": "checksum_failures",
    "pages_pushed": "pushed_pages",
    "bytes_pushed": "pushed_bytes",
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


def families(snapshot: NodeSnapshot) -> Iterator[Metric]:
    """All metrics of a node."""
    values: dict[str, dict[Labels, float]] = {}
    for samples in (_of_node, _of_namespaces, _of_operations):
        for name, labels, value in samples(snapshot):
            of_metric = values.setdefault(name, {})
            of_metric[labels] = of_metric.get(labels, 0.0) + value
    for definition in METRICS:
        if definition.kind != "histogram":
            family_type = CounterMetricFamily if definition.kind == "counter" else GaugeMetricFamily
            family = family_type(PREFIX + definition.name, definition.says, labels=definition.labels)
            for labels, value in values.get(definition.name, {}).items():
                family.add_metric(labels, value)
            yield family
    yield from _histograms(snapshot)


def _of_node(snapshot: NodeSnapshot) -> Iterator[Sample]:
    report = snapshot.report
    yield "node_info", (report.node,), 1
    yield "uptime_seconds", (), report.uptime_s
    for state in ("free", "used", "reserved", "quarantined"):
        yield "memory_bytes", (state,), getattr(report, f"{state}_bytes")
    yield "pins", (), report.pins
    yield "waits", (), report.waiters
    yield "connections", (), report.connections
    yield "sockets", (), snapshot.sockets
    for name, count in report.counters.items():
        metric = _RENAMED.get(name, name)
        if metric in _METRICS:
            yield metric, (), count
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
        name, tenant = split(space.name)  # of tenants the figures are their model's
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
        if space.settings.quota_bytes and not tenant:
            yield "quota_bytes", (name,), space.settings.quota_bytes
        yield from _counted(space, name)
    yield from _of_tenants(snapshot.report)


def _of_tenants(report: StatusReport) -> Iterator[Sample]:
    """Labels are bounded, whatever names tenants have."""
    sums: dict[str, list[int]] = {}
    for space in report.namespaces:
        if tenant := split(space.name)[1]:
            held = sums.setdefault(tenant, [0, 0])
            held[0], held[1] = held[0] + space.slot_bytes, held[1] + space.tier_bytes
    largest = sorted(sums, key=lambda tenant: -sum(sums[tenant]))[:MOST_TENANTS]
    for tenant, (memory_bytes, tier_bytes) in sums.items():
        label = tenant if tenant in largest else OTHERS
        yield "tenant_bytes", (label, "dram"), memory_bytes
        yield "tenant_bytes", (label, "below"), tier_bytes


def _counted(space: NamespaceStatus, label: str) -> Iterator[Sample]:
    """`evictions` is all of them; those without a reason of their own were for room."""
    told = {
        reason.removeprefix(_EVICTED): n
        for reason, n in space.counters.items()
        if reason.startswith(_EVICTED)
    }
    for reason, count in {"room": space.evictions - sum(told.values()), **told}.items():
        yield "evictions", (label, reason), count
    for name, count in space.counters.items():
        if name in _SPACE_COUNTERS:
            yield name, (label,), count
        elif name not in _SPACE_TOLD_ELSEWHERE and not name.startswith(_EVICTED):
            yield "namespace_events", (label, name), count


def _of_operations(snapshot: NodeSnapshot) -> Iterator[Sample]:
    for (operation, number), series in snapshot.series.items():
        name = _name_of(snapshot, number)
        yield "operations", (name, operation, "ok"), sum(series.counts) - series.refused
        yield "operations", (name, operation, "refused"), series.refused


def _histograms(snapshot: NodeSnapshot) -> Iterator[Metric]:
    latency = _METRICS["operation_seconds"]
    family = HistogramMetricFamily(PREFIX + latency.name, latency.says, labels=latency.labels)
    sums: dict[Labels, Series] = {}
    for (operation, number), series in snapshot.series.items():
        sums.setdefault((_name_of(snapshot, number), operation), Series()).add(series)
    for labels, series in sums.items():
        family.add_metric(labels, _cumulative(series), series.sum_s)
    yield family
    lag = _METRICS["event_loop_lag_seconds"]
    yield HistogramMetricFamily(
        PREFIX + lag.name, lag.says, buckets=_cumulative(snapshot.lag), sum_value=snapshot.lag.sum_s
    )


def _name_of(snapshot: NodeSnapshot, number: int) -> str:
    return NONE if number == NO_NAMESPACE else split(snapshot.namespace_names.get(number, NONE))[0]


def _cumulative(series: Series) -> list[tuple[str, float]]:
    """Prometheus's form: (upper bound, observations at or below it)."""
    total, rows = 0, []
    for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), series.counts, strict=True):
        total += count
        rows.append((bound, float(total)))
    return rows
