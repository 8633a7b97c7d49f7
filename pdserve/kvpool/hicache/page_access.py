"""One rank's pages in the pool: chains of page hashes and parts of pages, moved, measured and counted.

SGLang's storage threads move pages themselves. For pages of this host a batch is a few messages and one
native call (kvpool/native), which leaves the interpreter to the scheduler.

A rank's page is one page of the pool, or several: pieces of equal size, each with a name of its own. Workers
whose ranks hold more heads so share pages with workers whose ranks hold fewer. A page of the rank is there
when all of its pieces are.

The pool client's counters are Prometheus metrics of its worker (`CLIENT_METRICS`). A scheduler process serves
no HTTP. SGLang (with --enable-metrics, which every worker has) runs prometheus_client in its multi-process
mode: what any of its processes counts is written to a shared directory, and the worker's `/metrics` adds it
up. So counting in the scheduler is all that is needed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal

import torch

from pdserve.errors import PoolError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.client.operations import ClientCounters
from pdserve.kvpool.hicache.host_pool import HostPool
from pdserve.metric import Definition, by_name
from pdserve.pages import pool_key

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


class RankPages:
    """Keys are SGLang's, in hex; `host_indices` int64 [pages * page_size]. Thread-safe.

    Faults of the pool are misses. When a call returns or raises, nothing touches the host pools any more.
    All calls raise ValueError where a key is not hex, KeyError for an unknown part.
    """

    def __init__(
        self,
        config: PoolClientConfig,
        namespace: str,
        geometry: dict[str, str],
        pools: Mapping[str, HostPool],
        *,
        name: str = "hicache",
    ) -> None:
        """`pools`: by part. Raises ConfigError."""
        self._pools = pools
        largest = max(host.page_bytes // len(host.suffixes) for host in pools.values())
        self._client = PoolClient(config, namespace, geometry, name=name, page_bytes=largest)
        self._metrics = ClientMetrics()

    def present(self, keys: Sequence[str], parts: Sequence[str], tenant: str = "") -> list[list[bool]]:
        """For each part and each page: whether the pool has it. One question to the pool for all. `tenant`:
        whose pages they are, here and below; empty: nobody's.
        """
        names = [self._names(keys, part) for part in parts]
        found = iter(self._client.exists([name for ours in names for name in ours], tenant))
        present = [
            self._whole(list(islice(found, len(ours))), part) for part, ours in zip(parts, names, strict=True)
        ]
        self._publish()
        return present

    def get(self, part: str, keys: Sequence[str], host_indices: torch.Tensor, tenant: str = "") -> list[bool]:
        """Read pages into the part's host pool. True: the page is there. Raises PageMismatch."""
        host = self._pools[part]
        names, pages = self._names(keys, part), host.pieces(host.pages(len(keys), host_indices))
        with self._metrics.timed("read"):
            done = self._client.get(names, pages, tenant=tenant)
        self._publish()
        return self._whole(done, part)

    def put(self, part: str, keys: Sequence[str], host_indices: torch.Tensor, tenant: str = "") -> list[bool]:
        """Write pages from the part's host pool. True: the page is in the pool. Raises PageMismatch."""
        host = self._pools[part]
        names, pages = self._names(keys, part), host.pieces(host.pages(len(keys), host_indices))
        with self._metrics.timed("written"):
            done = self._client.put(names, pages, tenant)
        self._publish()
        return self._whole(done, part)

    def clear(self) -> int:
        """Drop the namespace's pages. Returns their number."""
        return self._client.clear()

    def check(self) -> dict[str, PoolError | None]:
        """The node that is asked: None, or why it does not serve us, by its name."""
        return self._client.check()

    def close(self) -> None:
        """Close all connections. Idempotent. Calls in progress end with misses."""
        self._client.close()

    def _names(self, keys: Sequence[str], part: str) -> list[bytes]:
        hashes = [bytes.fromhex(key) for key in keys]
        return [pool_key(digest, suffix) for digest in hashes for suffix in self._pools[part].suffixes]

    def _whole(self, pieces: list[bool], part: str) -> list[bool]:
        """Which pages have all of their pieces."""
        count = len(self._pools[part].suffixes)
        return [all(pieces[start : start + count]) for start in range(0, len(pieces), count)]

    def _publish(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the metrics' directory may be full or gone
            self._metrics.publish(self._client.counters)
