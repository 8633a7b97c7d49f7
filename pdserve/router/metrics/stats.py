"""The router's metrics: plain counters on the hot path, turned into Prometheus families when scraped.

Counting is a dictionary increment; prometheus_client's own counters take a lock each and cost ten times
that. What there is stands in `metric_names`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.metric import Labels, by_name
from pdserve.router.fleet.registry import Fleet
from pdserve.router.metrics.names import METRICS
from pdserve.router.upstream.client import ConnectionCounts

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_BY_NAME: Final = by_name(METRICS)
V = TypeVar("V")
MAX_PLACEMENTS: Final = 64
"""Label values of placements; policies of other packages may have any words."""


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
        self.requests: defaultdict[Labels, int] = defaultdict(int)
        """(route, status); status `aborted`: the client left before there was one."""
        self.first_byte: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.first_token: defaultdict[str, Histogram] = defaultdict(Histogram)
        """By part, see `metric_names.PARTS`."""
        self.turn_tokens: defaultdict[Labels, int] = defaultdict(int)
        """Prompt tokens by (turn, tier)."""
        self.placements: dict[Labels, int] = {}
        """By (role, reason)."""
        self.prefill: defaultdict[str, int] = defaultdict(int)
        self.settle: defaultdict[str, int] = defaultdict(int)
        self.pull_ahead: defaultdict[str, int] = defaultdict(int)
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

    def on_placed(self, role: str, reason: str) -> None:
        """A worker of the role was chosen, or none was, for that reason."""
        key = role, reason
        if key not in self.placements and len(self.placements) >= MAX_PLACEMENTS:
            key = role, "other"
        self.placements[key] = self.placements.get(key, 0) + 1


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
        stats, upstream = self._stats, self._upstream
        counts = upstream.counts
        connections = {
            "opened": counts.opened,
            "reused": counts.reused,
            "stale": counts.stale,
            "failed": counts.failed,
        }
        yield samples("requests", stats.requests)
        yield samples("requests_in_flight", stats.in_flight)
        yield histograms("time_to_first_byte_seconds", _keyed(stats.first_byte))
        yield histograms("first_token_seconds", _keyed(stats.first_token))
        yield samples("turn_tokens", stats.turn_tokens)
        yield samples("client_aborts", _keyed(stats.client_aborts))
        yield samples("stream_errors", _keyed(stats.stream_errors))
        yield samples("placements", stats.placements)
        yield samples("prefill", _keyed(stats.prefill))
        yield samples("settle", _keyed(stats.settle))
        yield samples("pull_ahead", _keyed(stats.pull_ahead))
        yield samples("decode_retries", _keyed(stats.decode_retries))
        yield samples("streams_continued", _keyed(stats.continued))
        yield samples("retries_refused", stats.retries_refused)
        yield samples("prefill_hedges", stats.hedges)
        yield samples("prompt_tokens", stats.prompt_tokens)
        yield samples("prompt_cached_tokens", _keyed(stats.cached_tokens))
        yield samples("prefill_missing_pages", stats.missing_pages)
        yield samples("processes_silent", 0)  # itself it speaks; the parent adds those that do not
        yield samples("joins_refused", stats.joins_refused)
        yield samples("sessions", self._session_count())
        yield samples("upstream_connections", _keyed(connections))
        yield samples("upstream_connections_open", upstream.open_count)
        yield samples("upstream_connections_idle", upstream.idle_count)
        workers = {(worker.id, worker.role): worker for worker in self._fleet.workers}
        in_flight: dict[Labels, int] = dict.fromkeys(workers, 0)
        for worker in self._fleet.at_work:
            key = worker.id, worker.role
            in_flight[key] = in_flight.get(key, 0) + worker.in_flight
        yield samples("worker_requests_in_flight", in_flight)
        yield samples("worker_healthy", {key: w.ready and w.refused is None for key, w in workers.items()})
        yield samples("worker_draining", {key: w.draining for key, w in workers.items()})
        yield samples("worker_circuit_open", {key: w.retry_at_s > 0 for key, w in workers.items()})
        yield samples("worker_refused", {key: w.refused is not None for key, w in workers.items()})


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


def _keyed(values: Mapping[str, V]) -> dict[Labels, V]:
    return {(key,): value for key, value in list(values.items())}


def make_registry(*collectors: Collector) -> CollectorRegistry:
    """A registry of this router alone."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return registry
