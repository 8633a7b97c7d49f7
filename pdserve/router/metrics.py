"""The router's metrics: plain counters on the hot path, turned into Prometheus families when scraped.

Counting is a dictionary increment; prometheus_client's own counters take a lock each and cost ten times
that. Names begin with `pdserve_router_`, end with their unit, and stay as they are: dashboards rest on them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.router.fleet import Fleet
from pdserve.router.upstream import ConnectionCounts

PREFIX = "pdserve_router_"
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Histogram:
    """Observations in seconds, in `BUCKETS_S` and one beyond."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

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
        self.requests: defaultdict[tuple[str, str], int] = defaultdict(int)
        """(route, status); status `aborted`: the client left before there was one."""
        self.first_byte: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.prefill: defaultdict[str, int] = defaultdict(int)
        self.settle: defaultdict[str, int] = defaultdict(int)
        self.decode_retries: defaultdict[str, int] = defaultdict(int)
        self.client_aborts: defaultdict[str, int] = defaultdict(int)
        """By the phase the request was in: body, settle, prefill, decode, stream."""
        self.stream_errors: defaultdict[str, int] = defaultdict(int)
        self.continued: defaultdict[str, int] = defaultdict(int)
        self.retries_refused = 0
        self.hedges = 0
        self.joins_refused = 0
        self.prompt_tokens = 0
        self.cached_tokens: defaultdict[str, int] = defaultdict(int)
        self.missing_pages = 0


class UpstreamView(Protocol):
    """What is shown of the connections to the workers."""

    counts: ConnectionCounts

    @property
    def open_count(self) -> int:
        """Open connections."""
        ...

    @property
    def idle_count(self) -> int:
        """Open connections that no request uses."""
        ...


class RouterCollector(Collector):
    """Shows `Stats`, the fleet and the connections to Prometheus."""

    def __init__(
        self, stats: Stats, fleet: Fleet, upstream: UpstreamView, session_count: Callable[[], int]
    ) -> None:
        self._stats = stats
        self._fleet = fleet
        self._upstream = upstream
        self._session_count = session_count

    def collect(self) -> Iterable[Metric]:
        """All families."""
        yield from self._requests()
        yield from self._stages()
        yield from self._workers()
        yield from self._connections()

    def _requests(self) -> Iterable[Metric]:
        stats = self._stats
        requests = CounterMetricFamily(PREFIX + "requests", "Requests answered.", labels=("route", "status"))
        for key, count in list(stats.requests.items()):
            requests.add_metric(key, count)
        yield requests
        yield GaugeMetricFamily(
            PREFIX + "requests_in_flight", "Requests being answered.", value=stats.in_flight
        )
        first_byte = HistogramMetricFamily(
            PREFIX + "time_to_first_byte_seconds",
            "From a request's arrival to the first byte of its answer.",
            labels=("route",),
        )
        for route, histogram in list(stats.first_byte.items()):
            first_byte.add_metric((route,), histogram.cumulative(), histogram.sum_s)
        yield first_byte
        yield _counter("client_aborts", "Requests whose client left, by phase.", "phase", stats.client_aborts)
        yield _counter(
            "stream_errors", "Streams ended by an error event, by reason.", "reason", stats.stream_errors
        )

    def _stages(self) -> Iterable[Metric]:
        stats = self._stats
        yield _counter("prefill", "Prefill stages, by outcome.", "outcome", stats.prefill)
        yield _counter("settle", "Waits for a previous turn's pages, by outcome.", "outcome", stats.settle)
        yield _counter(
            "decode_retries", "Requests tried on another worker, by reason.", "reason", stats.decode_retries
        )
        yield _counter(
            "streams_continued",
            "Streams gone on with by another worker, by reason.",
            "reason",
            stats.continued,
        )
        yield CounterMetricFamily(
            PREFIX + "retries_refused", "Retries that the budget refused.", value=stats.retries_refused
        )
        yield CounterMetricFamily(
            PREFIX + "prefill_hedges", "Prefills asked of a second worker.", value=stats.hedges
        )
        yield CounterMetricFamily(
            PREFIX + "prompt_tokens", "Prompt tokens that prefill workers saw.", value=stats.prompt_tokens
        )
        yield _counter(
            "prompt_cached_tokens", "Prompt tokens found cached by prefill.", "source", stats.cached_tokens
        )
        yield CounterMetricFamily(
            PREFIX + "prefill_missing_pages",
            "Pages not published when the publish deadline passed.",
            value=stats.missing_pages,
        )

    def _workers(self) -> Iterable[Metric]:
        labels = ("worker", "role")
        load = GaugeMetricFamily(
            PREFIX + "worker_requests_in_flight", "Requests this router has at a worker.", labels=labels
        )
        healthy = GaugeMetricFamily(
            PREFIX + "worker_healthy", "1: last probe said ready and the worker has joined.", labels=labels
        )
        circuit = GaugeMetricFamily(
            PREFIX + "worker_circuit_open", "1: too many requests failed there in a row.", labels=labels
        )
        refused = GaugeMetricFamily(
            PREFIX + "worker_refused", "1: refused at join, its pages do not fit the others'.", labels=labels
        )
        for worker in self._fleet.workers:
            key = (worker.id, worker.role)
            load.add_metric(key, worker.in_flight)
            healthy.add_metric(key, worker.ready and worker.refused is None)
            circuit.add_metric(key, worker.retry_at_s > 0)
            refused.add_metric(key, worker.refused is not None)
        yield from (load, healthy, circuit, refused)
        yield CounterMetricFamily(
            PREFIX + "joins_refused", "Workers refused at join.", value=self._stats.joins_refused
        )
        yield GaugeMetricFamily(
            PREFIX + "sessions", "Sessions in the session table.", value=self._session_count()
        )

    def _connections(self) -> Iterable[Metric]:
        counts = self._upstream.counts
        by_kind = {
            "opened": counts.opened,
            "reused": counts.reused,
            "stale": counts.stale,
            "failed": counts.failed,
        }
        yield _counter(
            "upstream_connections",
            "Connections to workers taken for a request, by kind; stale ones were replaced.",
            "kind",
            by_kind,
        )
        yield GaugeMetricFamily(
            PREFIX + "upstream_connections_open", "Open connections.", value=self._upstream.open_count
        )
        yield GaugeMetricFamily(
            PREFIX + "upstream_connections_idle", "Idle connections.", value=self._upstream.idle_count
        )


def make_registry(*collectors: Collector) -> CollectorRegistry:
    """A registry of this router alone."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return registry


def _counter(name: str, documentation: str, label: str, values: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, documentation, labels=(label,))
    for key, count in list(values.items()):
        family.add_metric((key,), count)
    return family
