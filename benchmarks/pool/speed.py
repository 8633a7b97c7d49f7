"""How fast the pool moves pages, against what this machine's memory can do, and against other stores.

One client process, one pool node that the benchmark starts; beside it, in the same run, whatever peers were
asked for. A round is, one after the other: a NumPy copy of a batch (memcpy), then for each store, in an order
that turns from round to round, a put of a batch under new keys and a get of a batch that was put a while ago.
Figures are medians over rounds, so whatever else the machine does hits all alike, and ratios compare like
with like. Batches take turns among buffers and pages that are together larger than a CPU's cache.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from benchmarks.pool.own_node import BenchPath
from benchmarks.stores import BenchError, PageStore
from pdserve.kvpool.protocol.base import KEY_BYTES
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers

ROTATE_BYTES: Final = 256 * 1024 * 1024  # touched before one is touched again
MAX_SETS: Final = 128
MIN_ROUNDS: Final = 5
WARM_UP_ROUNDS: Final = 3
SINGLE_GETS: Final = 1000

PageSets = list[list[PageBuffers]]


class PeerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What another store did in the same rounds; 10^9 bytes per second, medians."""

    get_gbps: float
    put_gbps: float


class PoolFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One line of results. Rates in 10^9 bytes per second, medians; latencies of getting a single page."""

    path: str
    checksum: bool
    page_bytes: int
    batch_pages: int
    rounds: int
    memcpy_gbps: float
    get_gbps: float
    put_gbps: float
    get_over_memcpy: float
    put_over_memcpy: float
    single_get_p50_us: float
    single_get_p99_us: float
    peers: dict[str, PeerFigures] = {}


@dataclass(frozen=True)
class Workload:
    """What to measure with one client."""

    path: BenchPath
    checksum: bool
    page_bytes: int
    batch_pages: int
    seconds: float
    capacity_bytes: int  # of the pool: what is got must not have been evicted


@dataclass
class _Contender:
    """A store in the measurement: what it holds, oldest first, and how long its operations took, in s."""

    store: PageStore
    stored: deque[list[bytes]] = field(default_factory=deque)
    read: list[bytes] = field(default_factory=list)  # the batch that was got last
    put_s: list[float] = field(default_factory=list)
    get_s: list[float] = field(default_factory=list)

    def round(self, pages: list[PageBuffers], copies: list[PageBuffers], pattern: Bytes1D, lag: int) -> None:
        """One put, and once `lag` batches are behind it one get: what was put just now is still in the
        cache.
        """
        keys = [os.urandom(KEY_BYTES) for _ in pages]
        for key, page in zip(keys, pages, strict=True):
            page[0][:KEY_BYTES] = np.frombuffer(key, np.uint8)  # no two pages alike
        self.put_s.append(_timed(self.store.put, keys, pages))
        self.stored.append(keys)
        if len(self.stored) > lag:
            self.read = self.stored.popleft()
            self.get_s.append(_timed(self.store.get, self.read, copies))
            _verify(self.read, copies, pattern, whole=len(self.get_s) <= WARM_UP_ROUNDS)
            self.store.forget(self.read)

    def gbps(self, batch_bytes: int) -> tuple[float, float]:
        """Get and put."""
        return _gbps(self.get_s, batch_bytes), _gbps(self.put_s, batch_bytes)


def measure(pool: PageStore, workload: Workload, peers: Mapping[str, PageStore] | None = None) -> PoolFigures:
    """Run the workload. Raises BenchError if a store did not keep or return what it was given."""
    pattern = np.random.default_rng(0).integers(0, 256, workload.page_bytes, np.uint8)
    source_blocks, source_sets = _page_sets(workload, pattern)
    target_blocks, target_sets = _page_sets(workload, pattern)
    sources, targets = itertools.cycle(source_sets), itertools.cycle(target_sets)
    ours = _Contender(pool)
    beside = {name: _Contender(store) for name, store in (peers or {}).items()}
    contenders = [ours, *beside.values()]
    copy_s: list[float] = []
    lag = min(len(source_sets) // 2, workload.capacity_bytes // _batch_bytes(workload) // 4)
    with ExitStack() as lent:
        for contender in contenders:
            lent.enter_context(contender.store.lend([*source_blocks, *target_blocks]))
        until = time.perf_counter() + workload.seconds
        while len(ours.get_s) < MIN_ROUNDS + WARM_UP_ROUNDS or time.perf_counter() < until:
            copy_s.append(_timed(_copy, next(sources), next(targets)))
            for contender in contenders:
                contender.round(next(sources), next(targets), pattern, lag)
            contenders.append(contenders.pop(0))
        copies = next(targets)
        singles = sorted(_timed(pool.get, ours.read[:1], copies[:1]) for _ in range(SINGLE_GETS))
        for contender in contenders:
            for keys in contender.stored:
                contender.store.forget(keys)
    return _figures(workload, copy_s, ours, beside, singles)


def _figures(
    workload: Workload,
    copy_s: list[float],
    ours: _Contender,
    beside: Mapping[str, _Contender],
    singles: list[float],
) -> PoolFigures:
    batch_bytes = _batch_bytes(workload)
    memcpy = _gbps(copy_s, batch_bytes)
    get, put = ours.gbps(batch_bytes)
    others = {name: contender.gbps(batch_bytes) for name, contender in beside.items()}
    return PoolFigures(
        path=workload.path,
        checksum=workload.checksum,
        page_bytes=workload.page_bytes,
        batch_pages=workload.batch_pages,
        rounds=len(ours.get_s) - WARM_UP_ROUNDS,
        memcpy_gbps=round(memcpy, 3),
        get_gbps=round(get, 3),
        put_gbps=round(put, 3),
        get_over_memcpy=round(get / memcpy, 3),
        put_over_memcpy=round(put / memcpy, 3),
        single_get_p50_us=round(singles[len(singles) // 2] * 1e6, 1),
        single_get_p99_us=round(singles[len(singles) * 99 // 100] * 1e6, 1),
        peers={
            name: PeerFigures(get_gbps=round(peer_get, 3), put_gbps=round(peer_put, 3))
            for name, (peer_get, peer_put) in others.items()
        },
    )


def _gbps(times_s: list[float], batch_bytes: int) -> float:
    return batch_bytes / statistics.median(times_s[WARM_UP_ROUNDS:]) / 1e9


def _batch_bytes(workload: Workload) -> int:
    return workload.page_bytes * workload.batch_pages


def _page_sets(workload: Workload, pattern: Bytes1D) -> tuple[list[Bytes1D], PageSets]:
    """Batches of pages of one segment each, in memory that was touched: one block for each batch, and its
    pages.
    """
    count = min(MAX_SETS, max(2, -(-ROTATE_BYTES // _batch_bytes(workload))))
    blocks = [np.tile(pattern, workload.batch_pages) for _ in range(count)]
    size = workload.page_bytes
    return blocks, [
        [(block[start : start + size],) for start in range(0, block.nbytes, size)] for block in blocks
    ]


def _timed(work: Callable[..., None], *arguments: object) -> float:
    began = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began


def _verify(keys: list[bytes], pages: list[PageBuffers], pattern: Bytes1D, *, whole: bool) -> None:
    """`whole` reads every byte; else only the keys, so that the next measurement does not begin with a cache
    that this emptied.
    """
    for key, (page,) in zip(keys, pages, strict=True):
        right = page[:KEY_BYTES].tobytes() == key
        if not right or (whole and not np.array_equal(page[KEY_BYTES:], pattern[KEY_BYTES:])):
            raise BenchError("the pool returned other bytes than were put")


def _copy(pages: list[PageBuffers], targets: list[PageBuffers]) -> None:
    for page, target in zip(pages, targets, strict=True):
        np.copyto(target[0], page[0])
