"""The pool client's counters as Prometheus metrics of its worker (`CLIENT_METRICS`).

A scheduler process serves no HTTP. SGLang (with --enable-metrics, which every worker has) runs
prometheus_client in its multi-process mode: what any of its processes counts is written to a shared
directory, and the worker's `/metrics` adds it up. So counting in the scheduler is all that is needed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Final, Literal

from pdserve.kvpool.client.operations import ClientCounters
from pdserve.metric import Definition, by_name

if TYPE_CHECKING:
    from prometheus_client import Counter

CLIENT_PREFIX: Final = "pdserve_pool_client_"


CLIENT_METRICS: Final = (
    Definition(
        "pages",
        "counter",
        ("result",),
        "KV pages by what became of them: read, missed, written, present (another had written it), refused "
        "(no room), lost, corrupt, forged (the tag was made without the page key), and of those read: ssd "
        "(a node brought them up from a tier below its memory).",
        CLIENT_PREFIX,
    ),
    Definition(
        "bytes",
        "counter",
        ("direction",),
        "KV bytes read from the pool and written to it, by direction.",
        CLIENT_PREFIX,
    ),
    Definition(
        "transfer_seconds",
        "histogram",
        ("direction",),
        "Time of a batch of pages read or written, from the first request to the last "
        "byte. Throughput is the rate of the bytes divided by the rate of this sum.",
        CLIENT_PREFIX,
    ),
    Definition(
        "failures",
        "counter",
        (),
        "Operations on nodes that ended with an error or at a deadline.",
        CLIENT_PREFIX,
    ),
)
"""The metrics of a worker's pool client."""

BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BY_NAME: Final = by_name(CLIENT_METRICS)


class ClientMetrics:
    """Publishes the growth of a `ClientCounters`, and how long transfers take. Thread-safe."""

    def __init__(self) -> None:
        # imported before SGLang has set up its mode, the process's counts would never be added up
        from prometheus_client import CollectorRegistry, Histogram

        # its own registry: a scheduler may attach a storage backend more than once
        self._registry = CollectorRegistry()
        pages, transferred = self._counter("pages"), self._counter("bytes")
        self._counters: dict[str, Counter] = {"failures": self._counter("failures")}
        for name in asdict(ClientCounters()):
            kind, _, label = name.partition("_")
            if kind == "pages":
                self._counters[name] = pages.labels(label)
            elif kind == "bytes":
                self._counters[name] = transferred.labels(label)
        seconds = _BY_NAME["transfer_seconds"]
        self._seconds = Histogram(
            seconds.family_name, seconds.says, seconds.labels, registry=self._registry, buckets=BUCKETS_S
        )
        self._lock = threading.Lock()
        self._published = asdict(ClientCounters())

    def _counter(self, name: str) -> Counter:
        definition = _BY_NAME[name]
        from prometheus_client import Counter

        return Counter(definition.family_name, definition.says, definition.labels, registry=self._registry)

    @contextmanager
    def timed(self, direction: Literal["read", "written"]) -> Iterator[None]:
        """The block moves a batch of pages."""
        started_s = time.monotonic()
        try:
            yield
        finally:
            self._seconds.labels(direction).observe(time.monotonic() - started_s)

    def publish(self, counters: ClientCounters) -> None:
        """Add what `counters` has gained since the last call."""
        with self._lock:
            for name, value in asdict(counters).items():
                if value > self._published[name]:
                    self._counters[name].inc(value - self._published[name])
                    self._published[name] = value
