"""The client's counters as Prometheus metrics."""

from __future__ import annotations

from pdserve.kvpool.client.operations import ClientCounters
from pdserve.kvpool.hicache.client_metrics import ClientMetrics


def test_every_counter_is_published_once_and_only_its_growth() -> None:
    metrics = ClientMetrics()
    assert set(metrics._counters) == set(ClientCounters().__dict__)
    counters = ClientCounters(pages_corrupt=2, bytes_read=100, failures=1)
    metrics.publish(counters)
    metrics.publish(counters)
    counters.pages_corrupt = 5
    metrics.publish(counters)
    values = {name: counter._value.get() for name, counter in metrics._counters.items()}
    assert values == {**dict.fromkeys(values, 0), "pages_corrupt": 5, "bytes_read": 100, "failures": 1}
