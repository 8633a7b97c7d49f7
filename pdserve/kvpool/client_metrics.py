"""The pool client's counters as Prometheus metrics of its worker.

A scheduler process serves no HTTP. SGLang (with --enable-metrics, which every worker has) runs
prometheus_client in its multi-process mode: what any of its processes counts is written to a shared
directory, and the worker's `/metrics` adds it up. So counting in the scheduler is all that is needed.

| metric | labels |
|---|---|
| `pdserve_pool_client_pages_total` | `result`: read, missed, written, ...: `ClientCounters` |
| `pdserve_pool_client_bytes_total` | `direction`: read, written |
| `pdserve_pool_client_failures_total` | |
"""

from __future__ import annotations

import threading
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter

from pdserve.kvpool.exchange import ClientCounters


class ClientMetrics:
    """Publishes the growth of a `ClientCounters`. Thread-safe."""

    def __init__(self) -> None:
        # its own registry: a scheduler may attach a storage backend more than once
        registry = CollectorRegistry()
        pages = Counter(
            "pdserve_pool_client_pages", "KV pages by what became of them", ["result"], registry=registry
        )
        transferred = Counter(
            "pdserve_pool_client_bytes",
            "KV bytes moved from and to the pool",
            ["direction"],
            registry=registry,
        )
        failures = Counter(
            "pdserve_pool_client_failures",
            "Node operations cut short by an error or deadline",
            registry=registry,
        )
        self._counters: dict[str, Counter] = {"failures": failures}
        for name in asdict(ClientCounters()):
            kind, _, label = name.partition("_")
            if kind == "pages":
                self._counters[name] = pages.labels(label)
            elif kind == "bytes":
                self._counters[name] = transferred.labels(label)
        self._lock = threading.Lock()
        self._published = asdict(ClientCounters())

    def publish(self, counters: ClientCounters) -> None:
        """Add what `counters` has gained since the last call."""
        with self._lock:
            for name, value in asdict(counters).items():
                if value > self._published[name]:
                    self._counters[name].inc(value - self._published[name])
                    self._published[name] = value
