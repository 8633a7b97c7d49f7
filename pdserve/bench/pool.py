"""How fast the pool moves pages, against what this machine's memory can do.

One client process, one pool node that the benchmark starts. A round is, one after the other: a NumPy copy of
a batch (memcpy), a put of a batch under new keys, a get of a batch that was put a while ago. Figures are
medians over rounds, so whatever else the machine does hits all three alike, and ratios compare like with
like. Batches take turns among buffers and pages that are together larger than a CPU's cache.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from pdserve.errors import PdserveError
from pdserve.kvpool.client import PoolClient
from pdserve.kvpool.transports.base import Bytes1D, PageBuffers
from pdserve.kvpool.wire import KEY_BYTES

ROTATE_BYTES: Final = 256 * 1024 * 1024  # touched before one is touched again
MAX_SETS: Final = 128
MIN_ROUNDS: Final = 5
WARM_UP_ROUNDS: Final = 3
SINGLE_GETS: Final = 1000


class BenchError(PdserveError):
    """The benchmark could not measure: a page was refused or lost, a tool is missing."""


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


@dataclass(frozen=True)
class Workload:
    """What to measure with one client."""

    path: str
    checksum: bool
    page_bytes: int
    batch_pages: int
    seconds: float
    capacity_bytes: int  # of the pool: what is got must not have been evicted


def measure(client: PoolClient, workload: Workload) -> PoolFigures:
    """Run the workload. Raises BenchError if the pool did not store or return what it was given."""
    pattern = np.random.default_rng(0).integers(0, 256, workload.page_bytes, np.uint8)
    sources = _rotation(workload, pattern)
    targets = _rotation(workload, pattern)
    stored: deque[list[bytes]] = deque()
    copy_s: list[float] = []
    put_s: list[float] = []
    get_s: list[float] = []
    lag = min(_sets(workload) // 2, workload.capacity_bytes // _batch_bytes(workload) // 4)
    until = time.perf_counter() + workload.seconds
    while len(get_s) < MIN_ROUNDS + WARM_UP_ROUNDS or time.perf_counter() < until:
        copy_s.append(_timed(_copy, next(sources), next(targets)))
        pages = next(sources)
        keys = [os.urandom(KEY_BYTES) for _ in pages]
        for key, page in zip(keys, pages, strict=True):
            page[0][:KEY_BYTES] = np.frombuffer(key, np.uint8)  # no two pages alike
        put_s.append(_timed(_put, client, keys, pages))
        stored.append(keys)
        if len(stored) <= lag:
            continue  # what was put just now is still in the cache: get what was put a while ago
        keys, copies = stored.popleft(), next(targets)
        get_s.append(_timed(_get, client, keys, copies))
        _verify(keys, copies, pattern, whole=len(get_s) <= WARM_UP_ROUNDS)
    singles = sorted(_timed(_get, client, keys[:1], copies[:1]) for _ in range(SINGLE_GETS))
    return _figures(workload, copy_s, put_s, get_s, singles)


def _figures(
    workload: Workload, copy_s: list[float], put_s: list[float], get_s: list[float], singles: list[float]
) -> PoolFigures:
    memcpy, put, get = (
        _batch_bytes(workload) / statistics.median(times[WARM_UP_ROUNDS:]) / 1e9
        for times in (copy_s, put_s, get_s)
    )
    return PoolFigures(
        path=workload.path,
        checksum=workload.checksum,
        page_bytes=workload.page_bytes,
        batch_pages=workload.batch_pages,
        rounds=len(get_s) - WARM_UP_ROUNDS,
        memcpy_gbps=round(memcpy, 3),
        get_gbps=round(get, 3),
        put_gbps=round(put, 3),
        get_over_memcpy=round(get / memcpy, 3),
        put_over_memcpy=round(put / memcpy, 3),
        single_get_p50_us=round(singles[len(singles) // 2] * 1e6, 1),
        single_get_p99_us=round(singles[len(singles) * 99 // 100] * 1e6, 1),
    )


def _batch_bytes(workload: Workload) -> int:
    return workload.page_bytes * workload.batch_pages


def _sets(workload: Workload) -> int:
    return min(MAX_SETS, max(2, -(-ROTATE_BYTES // _batch_bytes(workload))))


def _rotation(workload: Workload, pattern: Bytes1D) -> Iterator[list[PageBuffers]]:
    """Batches of pages of one segment each, in memory that was touched, in turn."""
    sets: list[list[PageBuffers]] = [
        [(pattern.copy(),) for _ in range(workload.batch_pages)] for _ in range(_sets(workload))
    ]
    while True:
        yield from sets


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


def _put(client: PoolClient, keys: list[bytes], pages: list[PageBuffers]) -> None:
    if not all(client.put(keys, pages)):
        raise BenchError("the pool did not store a page: is its capacity large enough, and the node well?")


def _get(client: PoolClient, keys: list[bytes], pages: list[PageBuffers]) -> None:
    if not all(client.get(keys, pages)):
        raise BenchError("the pool did not return a page that was just put")
