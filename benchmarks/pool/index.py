"""What the node's index costs: memory per page, time to find a page and to write one, at growing numbers of
pages.

Each size in a process of its own, so that its memory is what the process grew by. Pages are written as
clients write them, 32 at a time; found by keys that were never hashed before, as those that come out of a
message.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from benchmarks.stores import BenchError
from pdserve.kvpool.core.events import Action
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.core.store.slot_allocator import SlotAllocator

SIZES: Final = (10_000, 100_000, 1_000_000, 10_000_000)
PAGE_BYTES: Final = 4096
SLAB_BYTES: Final = 4 << 20
BATCH: Final = 32
SAMPLE: Final = 20_000
ROUNDS: Final = 9
NAMESPACE: Final = 1


class IndexFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One size. Medians; `bytes_per_page` is everything that the node keeps in its own memory for a page."""

    pages: int
    bytes_per_page: float
    find_ns: float
    miss_ns: float
    write_ns: float


def measure_all(sizes: list[int]) -> Iterator[IndexFigures]:
    """Raises BenchError when a process dies (too little memory for so many pages)."""
    for pages in sizes:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            try:
                yield process.submit(measure, pages).result()
            except OSError as error:  # BrokenProcessPool is a RuntimeError
                raise BenchError(f"{pages} pages: {error}") from error
            except RuntimeError as error:
                raise BenchError(f"{pages} pages: the process ended: is there memory for them?") from error


def measure(pages: int) -> IndexFigures:
    """Fill a store with so many pages, in this process."""
    rng = np.random.default_rng(pages)
    every = max(1, pages // SAMPLE)
    sample: list[bytes] = []
    before = _resident_bytes()
    capacity = -(-pages * PAGE_BYTES // SLAB_BYTES) * SLAB_BYTES
    store = PageStore(SlotAllocator(capacity, SLAB_BYTES, PAGE_BYTES), 1)
    writes_ns = []
    for first in range(0, pages, BATCH):
        keys = _keys(rng, min(BATCH, pages - first))
        sample += [key for place, key in enumerate(keys, first) if place % every == 0]
        writes_ns.append(_write(store, keys) / len(keys))
    per_page = (_resident_bytes() - before) / pages
    find_ns = _find_ns(store, [sample[n] for n in rng.permutation(len(sample))], found=True)
    miss_ns = _find_ns(store, _keys(rng, SAMPLE), found=False)
    return IndexFigures(
        pages=pages,
        bytes_per_page=round(per_page, 1),
        find_ns=round(find_ns),
        miss_ns=round(miss_ns),
        write_ns=round(float(np.median(writes_ns))),
    )


def _write(store: PageStore, keys: list[bytes]) -> int:
    out: list[Action] = []
    namespace = store.index.namespace(NAMESPACE)
    started_ns = time.perf_counter_ns()
    slots = store.take(namespace, keys, PAGE_BYTES, PAGE_BYTES, out)
    store.commit(slots, [1] * len(slots), 0.0, out)
    took_ns = time.perf_counter_ns() - started_ns
    if len(slots) < len(keys):
        raise BenchError("the store is full: it should not be")
    return took_ns


def _find_ns(store: PageStore, keys: list[bytes], *, found: bool) -> float:
    """Per lookup; the median of rounds."""
    took = []
    for _ in range(ROUNDS):
        fresh = [bytes(bytearray(key)) for key in keys]
        started_ns = time.perf_counter_ns()
        lookup = store.index.namespace(NAMESPACE).lookup(0.0)
        slots = [lookup(key) for key in fresh]
        took.append((time.perf_counter_ns() - started_ns) / len(fresh))
        if (None in slots) == found:
            raise BenchError("the index does not find what was written, or finds what was not")
    return float(np.median(took))


def _keys(rng: np.random.Generator, count: int) -> list[bytes]:
    text = rng.bytes(32 * count)
    return [text[at : at + 32] for at in range(0, len(text), 32)]


def _resident_bytes() -> int:
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return resident_pages * 4096
