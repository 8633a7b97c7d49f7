"""Metrics of tenants and of the queue."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pdserve.metric import Labels
from pdserve.router.admission.gate import Entrance
from pdserve.router.metrics.exposition import histograms, samples


class EntranceCollector(Collector):
    """Shows an `Entrance` to Prometheus. Tenants are as many as the keys file names."""

    def __init__(self, entrance: Entrance) -> None:
        self._entrance = entrance

    def collect(self) -> Iterable[Metric]:
        """All families."""
        requests: dict[Labels, int] = {}
        tokens: dict[Labels, int] = {}
        tenants = self._entrance.tenants.all
        for tenant in tenants:
            requests[tenant.name, "admitted"] = tenant.use.requests
            requests[tenant.name, "refused"] = tenant.use.refused
            tokens[tenant.name, "prompt"] = tenant.use.prompt_tokens
            tokens[tenant.name, "output"] = tenant.use.output_tokens
        yield samples("tenant_requests", requests)
        yield samples("tenant_tokens", tokens)
        yield samples("tenant_running", {(tenant.name,): tenant.running for tenant in tenants})
        yield samples("tenant_waiting", {(tenant.name,): tenant.waiting for tenant in tenants})
        yield histograms("queue_wait_seconds", {(): self._entrance.queue_wait})
        yield samples("unknown_keys", self._entrance.unknown_keys)
