"""Metrics of tenants and of the queue."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.router.entrance import Entrance
from pdserve.router.metrics import PREFIX


class EntranceCollector(Collector):
    """Shows an `Entrance` to Prometheus. Tenants are as many as the keys file names."""

    def __init__(self, entrance: Entrance) -> None:
        self._entrance = entrance

    def collect(self) -> Iterable[Metric]:
        """All families."""
        requests = CounterMetricFamily(
            PREFIX + "tenant_requests",
            "Requests of a tenant, by outcome: admitted, or refused with 429.",
            labels=("tenant", "outcome"),
        )
        tokens = CounterMetricFamily(
            PREFIX + "tenant_tokens", "Tokens a tenant used, by kind.", labels=("tenant", "kind")
        )
        running = GaugeMetricFamily(
            PREFIX + "tenant_running", "Requests of a tenant that are served now.", labels=("tenant",)
        )
        waiting = GaugeMetricFamily(
            PREFIX + "tenant_waiting", "Requests of a tenant that wait in the queue.", labels=("tenant",)
        )
        for tenant in self._entrance.tenants.all:
            requests.add_metric((tenant.name, "admitted"), tenant.use.requests)
            requests.add_metric((tenant.name, "refused"), tenant.use.refused)
            tokens.add_metric((tenant.name, "prompt"), tenant.use.prompt_tokens)
            tokens.add_metric((tenant.name, "output"), tenant.use.output_tokens)
            running.add_metric((tenant.name,), tenant.running)
            waiting.add_metric((tenant.name,), tenant.waiting)
        yield from (requests, tokens, running, waiting)
        wait = self._entrance.queue_wait
        yield HistogramMetricFamily(
            PREFIX + "queue_wait_seconds",
            "Time that requests which had to wait spent in the queue.",
            buckets=wait.cumulative(),
            sum_value=wait.sum_s,
        )
        yield CounterMetricFamily(
            PREFIX + "unknown_keys", "Requests refused with 401.", value=self._entrance.unknown_keys
        )
