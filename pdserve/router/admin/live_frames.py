"""Frames: the content of the live page and of `pdserve top`. Pure.

A frame is made from two samples of the router's metrics and of the pool. A rate is the growth between the
samples. A counter that fell (its process was replaced) counts from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from pdserve.kvpool.admin.sampling import Rates, Row, busiest
from pdserve.kvpool.protocol.messages import NamespaceStatus
from pdserve.metric import Labels
from pdserve.router.fleet.worker import Worker
from pdserve.router.metrics.names import PARTS, TIERS
from pdserve.router.metrics.stats import BUCKETS_S, BY_NAME, Histogram, Snapshot

MAX_NAMESPACES: Final = 20


class Point(msgspec.Struct, frozen=True):
    """One point of the page's graphs. `at_s` is Unix time; rates are per second."""

    at_s: float
    requests_s: float = 0.0
    failed_s: float = 0.0
    """Requests with a 5xx answer or a broken stream, per second."""
    in_flight: int = 0
    first_byte_p50_s: float | None = None
    first_byte_p90_s: float | None = None
    parts_s: dict[str, float] = {}
    """Mean seconds to the first token of a stream, by part. Empty: no stream began."""
    tokens_s: dict[str, float] = {}
    """Prompt tokens per second, by tier."""


class WorkerView(msgspec.Struct, frozen=True):
    """One worker."""

    id: str
    role: str
    state: str
    in_flight: int | None
    """Requests of all of the router's processes. None: a process does not report them."""
    elsewhere: int
    """Requests of other routers, as the worker last reported."""
    queued_tokens: int
    free_kv_tokens: int | None
    says: str = ""


class NodeView(msgspec.Struct, frozen=True):
    """One pool node. `error`: the reason why it did not answer."""

    node: str
    error: str = ""
    used_bytes: int = 0
    capacity_bytes: int = 0
    pages: int = 0
    clients: int = 0
    operations_s: float = 0.0
    read_bytes_s: float = 0.0
    written_bytes_s: float = 0.0
    hit_rate: float | None = None


class SpaceView(msgspec.Struct, frozen=True):
    """One namespace, summed over all nodes. `quota_bytes` is 0 if it has no quota."""

    name: str
    pages: int
    page_bytes: int
    slot_bytes: int
    quota_bytes: int
    evictions: int
    evictions_s: float = 0.0
    hit_rate: float | None = None
    read_bytes_s: float = 0.0
    written_bytes_s: float = 0.0


class Problem(msgspec.Struct, frozen=True):
    """A warning or error of the router's log."""

    at_s: float
    level: str
    text: str
    count: int = 1
    """Number of equal lines in a row. `at_s` is the time of the last."""


class Frame(msgspec.Struct, frozen=True):
    """The state of router and pool at one moment. Figures are sums over the router's processes."""

    point: Point
    seconds: float
    waiting: int
    sessions: int
    workers: list[WorkerView]
    nodes: list[NodeView]
    namespaces: list[SpaceView]
    problems: list[Problem]
    """The newest first."""


def point_of(before: Snapshot, now: Snapshot, seconds: float, at_s: float) -> Point:
    """Rates and quantiles of the `seconds` between two snapshots."""
    statuses = _growth(before, now, "requests", "status")
    failed = sum(count for status, count in statuses.items() if status.startswith("5"))
    failed += sum(_growth(before, now, "stream_errors", "reason").values())
    tokens = _growth(before, now, "turn_tokens", "tier")
    first_byte = sum(_grown(before, now, "time_to_first_byte_seconds").values(), Histogram())
    parts = {part: histogram for (part,), histogram in _grown(before, now, "first_token_seconds").items()}
    streams = sum(parts["router"].counts) if "router" in parts else 0
    return Point(
        at_s,
        sum(statuses.values()) / seconds,
        failed / seconds,
        now.total("requests_in_flight"),
        quantile(first_byte, 0.5),
        quantile(first_byte, 0.9),
        {part: parts[part].sum_s / streams for part in PARTS if part in parts and parts[part].sum_s}
        if streams
        else {},
        {tier: tokens[tier] / seconds for tier in TIERS if tokens.get(tier)},
    )


def _growth(before: Snapshot, now: Snapshot, name: str, label: str) -> dict[str, float]:
    """The growth of a counter, summed by one label."""
    place = BY_NAME[name].labels.index(label)
    earlier, found = before.values.get(name, {}), dict[str, float]()
    for labels, value in now.values.get(name, {}).items():
        was = earlier.get(labels, 0.0)
        found[labels[place]] = found.get(labels[place], 0.0) + (value - was if value >= was else value)
    return found


def _grown(before: Snapshot, now: Snapshot, name: str) -> dict[Labels, Histogram]:
    """A histogram's new observations, by labels."""
    earlier = before.histograms.get(name, {})
    return {
        labels: histogram.since(earlier.get(labels, Histogram()))
        for labels, histogram in now.histograms.get(name, {}).items()
    }


def quantile(histogram: Histogram, share: float) -> float | None:
    """The quantile `share`, interpolated linearly within a bucket as in Prometheus' `histogram_quantile`.

    A quantile beyond the last bound is the last bound. None: the histogram is empty.
    """
    wanted, below, low = share * sum(histogram.counts), 0, 0.0
    for bound_s, count in zip(BUCKETS_S, histogram.counts, strict=False):
        if count and below + count >= wanted:
            return low + (bound_s - low) * (wanted - below) / count
        below, low = below + count, bound_s
    return low if wanted else None


def frame_of(
    point: Point,
    seconds: float,
    now: Snapshot,
    workers: Iterable[Worker],
    rows: Sequence[Row],
    problems: Iterable[Problem],
) -> Frame:
    """The frame of one moment. `rows`: a sample of the pool's nodes."""
    return Frame(
        point,
        seconds,
        now.total("tenant_waiting"),
        now.total("sessions"),
        [_worker(worker, _in_flight(worker, now)) for worker in workers],
        [_node(row) for row in rows],
        _namespaces(rows),
        list(problems),
    )


def _in_flight(worker: Worker, now: Snapshot) -> int | None:
    return now.value("worker_requests_in_flight", worker.id, worker.role) if now.is_whole else None


def _worker(worker: Worker, in_flight: int | None) -> WorkerView:
    if worker.refused is not None:
        state = "refused"
    elif not worker.ready:
        state = "down"
    elif worker.circuit.retry_at_s > 0:
        state = "failing"
    else:
        state = "draining" if worker.draining else "ready"
    return WorkerView(
        worker.id,
        worker.role,
        state,
        in_flight,
        0 if in_flight is None else max(0, worker.load - in_flight),
        worker.queued_tokens,
        worker.free_kv_tokens,
        worker.refused or "",
    )


def _node(row: Row) -> NodeView:
    report, total = row.report, row.total
    if report is None:
        return NodeView(row.node.node, row.error)
    return NodeView(
        row.node.node,
        "",
        report.used_bytes + report.reserved_bytes,
        report.capacity_bytes,
        report.pages,
        report.connections,
        total.operations_s,
        total.read_bytes_s,
        total.written_bytes_s,
        total.hit_rate,
    )


def _namespaces(rows: Sequence[Row]) -> list[SpaceView]:
    """Namespaces, sorted by moved bytes and then by size, largest first."""
    rates = {each.name: each for each in busiest(list(rows), 10**6)}
    spaces: dict[str, list[NamespaceStatus]] = {name: [] for name in rates}
    for row in rows:
        for space in row.report.namespaces if row.report is not None else ():
            spaces.setdefault(space.name, []).append(space)
    listed = [_space(name, own, rates.get(name) or Rates(name)) for name, own in spaces.items()]
    listed.sort(key=lambda s: (-(s.read_bytes_s + s.written_bytes_s), -s.page_bytes, s.name))
    return listed[:MAX_NAMESPACES]


def _space(name: str, own: Sequence[NamespaceStatus], rate: Rates) -> SpaceView:
    return SpaceView(
        name,
        sum(space.pages for space in own),
        sum(space.page_bytes for space in own),
        sum(space.slot_bytes for space in own),
        sum(space.settings.quota_bytes or 0 for space in own),
        sum(space.evictions for space in own),
        rate.evictions_s,
        rate.hit_rate,
        rate.read_bytes_s,
        rate.written_bytes_s,
    )
