"""The router's counters, its fleet and its connections as Prometheus families."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pdserve.metric import Labels
from pdserve.router.fleet.registry import Fleet
from pdserve.router.metrics.exposition import histograms, keyed, samples
from pdserve.router.metrics.stats import Stats
from pdserve.router.upstream.pool import ConnectionCounts


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
        yield histograms("time_to_first_byte_seconds", keyed(stats.first_byte))
        yield histograms("first_token_seconds", keyed(stats.first_token))
        yield samples("turn_tokens", stats.turn_tokens)
        yield samples("client_aborts", keyed(stats.client_aborts))
        yield samples("stream_errors", keyed(stats.stream_errors))
        yield samples("placements", stats.placements)
        yield samples("prefill", keyed(stats.prefill))
        yield samples("settle", keyed(stats.settle))
        yield samples("pull_ahead", keyed(stats.pull_ahead))
        yield samples("decode_retries", keyed(stats.decode_retries))
        yield samples("streams_continued", keyed(stats.continued))
        yield samples("retries_refused", stats.retries_refused)
        yield samples("prefill_hedges", stats.hedges)
        yield samples("prompt_tokens", stats.prompt_tokens)
        yield samples("prompt_cached_tokens", keyed(stats.cached_tokens))
        yield samples("prefill_missing_pages", stats.missing_pages)
        yield samples("processes_silent", 0)  # itself it speaks; the parent adds those that do not
        yield samples("joins_refused", stats.joins_refused)
        yield samples("sessions", self._session_count())
        yield samples("upstream_connections", keyed(connections))
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
