"""Records in the pool: beside the pages of the worker's namespace, and with the same rights.

Reading and writing block, so threads do it, each kind its own, with bounded queues. A reader waits at most
`lookup_s`. What is late, refused or lost is a record that is not there.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol, TypeVar

import numpy as np
from msgspec.structs import replace

from pdserve.engine.turns import record
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig

T = TypeVar("T")

MAX_KEYS: Final = 256
"""That are looked up at a time: the last answers of a conversation."""
_READERS: Final = 2
_WRITERS: Final = 1
_MAX_QUEUED: Final = 64
"""Of each kind."""
_NAME: Final = "turns"


class LateError(Exception):
    """The pool did not answer in time."""


class Namespace(Protocol):
    """Where the worker's pages are; an `AsyncPoolClient`."""

    config: PoolClientConfig
    namespace: str
    geometry: dict[str, str]


class Shelf:
    """Records in the namespace that `pages` names. Used in one event loop."""

    def __init__(self, pages: Namespace, lookup_s: float) -> None:
        """Connects lazily, or by `warm`."""
        self._lookup_s = lookup_s
        self._readers = _Threads(_READERS)
        self._writers = _Threads(_WRITERS)
        self._connect = functools.partial(
            PoolClient,
            _own_config(pages.config, lookup_s),
            pages.namespace,
            pages.geometry,
            name=_NAME,
            connections=_READERS + _WRITERS,
        )
        self._client: PoolClient | None = None
        self._closed = False

    def warm(self) -> None:
        """Connect in the background: within the time of a lookup that may not be possible."""
        self._submit(self._readers, lambda client: client.check())

    async def read(self, keys: Sequence[bytes], tenant: str = "") -> dict[bytes, list[int]]:
        """The tenant's records that the pool has of the last `MAX_KEYS` of these keys. Raises LateError."""
        wanted = list(keys)[-MAX_KEYS:]
        if not wanted:
            return {}
        work = self._submit(self._readers, lambda client: _read(client, wanted, tenant))
        if work is None:
            raise LateError("the threads are busy")
        try:
            return await asyncio.wait_for(asyncio.wrap_future(work), self._lookup_s)
        except TimeoutError:
            raise LateError("the pool is late") from None

    def write(self, key: bytes, ids: Sequence[int], tenant: str = "") -> asyncio.Future[bool] | None:
        """Store a record in the background. None: it is not stored, being too long, or too many wait."""
        if not 0 < len(ids) <= record.MAX_TOKENS:
            return None
        kept = list(ids)
        work = self._submit(self._writers, lambda client: _write(client, key, kept, tenant))
        return None if work is None else asyncio.wrap_future(work)

    def close(self) -> None:
        """End the threads and connections. Idempotent."""
        self._closed = True
        if self._client is not None:
            self._client.close()  # what is under way ends
            self._client = None
        self._readers.end()
        self._writers.end()

    def _submit(self, threads: _Threads, work: Callable[[PoolClient], T]) -> Future[T] | None:
        if self._closed:
            return None
        client = self._client = self._client or self._connect()
        return threads.submit(lambda: work(client))


class _Threads:
    """Threads with a bounded queue."""

    def __init__(self, count: int) -> None:
        self._executor = ThreadPoolExecutor(count, "pdserve-turns")
        self._places = threading.Semaphore(_MAX_QUEUED)

    def submit(self, work: Callable[[], T]) -> Future[T] | None:
        """None where the queue is full."""
        if not self._places.acquire(blocking=False):
            return None
        future = self._executor.submit(work)
        future.add_done_callback(lambda _: self._places.release())
        return future

    def end(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)


def _own_config(config: PoolClientConfig, lookup_s: float) -> PoolClientConfig:
    """With the deadlines of a lookup."""
    return replace(
        config,
        exists_timeout_s=lookup_s,
        get_timeout_s=lookup_s,
        restart_wait_s=0.0,
    )


def _read(client: PoolClient, keys: Sequence[bytes], tenant: str) -> dict[bytes, list[int]]:
    firsts = [np.empty(record.PAGE_BYTES, np.uint8) for _ in keys]
    there = client.get(keys, [[page] for page in firsts], tenant=tenant)
    first = {key: page for key, page, found in zip(keys, firsts, there, strict=True) if found}
    counts = {key: record.page_count(page) for key, page in first.items()}
    rest = [(key, name) for key, count in counts.items() for name in record.page_keys(key, count)[1:]]
    pages = [np.empty(record.PAGE_BYTES, np.uint8) for _ in rest]
    more: dict[bytes, list[record.Page]] = {}
    if rest:
        found_more = client.get([name for _, name in rest], [[page] for page in pages], tenant=tenant)
        for (key, _), page, found in zip(rest, pages, found_more, strict=True):
            if found:
                more.setdefault(key, []).append(page)
    return {
        key: record.from_pages([page, *more.get(key, ())])
        for key, page in first.items()
        if counts[key] and counts[key] == 1 + len(more.get(key, ()))
    }


def _write(client: PoolClient, key: bytes, ids: Sequence[int], tenant: str) -> bool:
    pages = record.to_pages(ids)
    return all(client.put(record.page_keys(key, len(pages)), [[page] for page in pages], tenant))
