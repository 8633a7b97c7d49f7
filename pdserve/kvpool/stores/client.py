"""A `PageStore` of another engine as the page mover and the turns of a worker use it: what `PoolClient` does
beside moving pages, done once for all stores.

- It connects lazily. So a worker starts without its store.
- A store that failed is left alone for a moment. The calls of that moment are misses at once.
- Code of other packages runs here. What it raises is a miss, and is logged and counted.
- Pages are counted as those of the pool are.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

from pdserve.errors import ConfigError, PoolError, PoolRefused, PoolUnavailable
from pdserve.kvpool.client.client import PoolClient, check_pages
from pdserve.kvpool.client.config import OWN_ENGINE, PoolClientConfig
from pdserve.kvpool.client.operations import ClientCounters, Tally
from pdserve.kvpool.client.reads.shared import SharedReads
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers
from pdserve.kvpool.stores.base import MakeStore, PageStore, StoreSettings
from pdserve.kvpool.stores.registry import kind_of

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_PAUSE_S: Final = 10.0


class PageClient(PageStore, Protocol):
    """A `PageStore` that counts, and judges its own speed: a `PoolClient` or a `StoreClient`."""

    config: PoolClientConfig
    namespace: str

    @property
    def counters(self) -> ClientCounters: ...

    def get(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffers], share: SharedReads | None = None
    ) -> list[bool]: ...

    def expected_read_s(self, keys: Sequence[bytes]) -> float: ...

    def left_to_compute(self, pages: int) -> None: ...


def open_client(
    config: PoolClientConfig,
    namespace: str,
    geometry: Mapping[str, str],
    *,
    name: str,
    page_bytes: int = 0,
    memory: Sequence[Bytes1D] = (),
) -> PageClient:
    """The client of the configured engine. Connects lazily. Raises ConfigError.

    `name`, `page_bytes`: as of `PoolClient`. `memory`: as of `StoreSettings`.
    """
    if config.engine == OWN_ENGINE:
        return PoolClient(config, namespace, dict(geometry), name=name, page_bytes=page_bytes)
    return StoreClient(config, namespace, geometry, kind_of(config.engine), memory)


class StoreClient:
    """One namespace of a store. Thread-safe. Faults of the store are misses."""

    def __init__(
        self,
        config: PoolClientConfig,
        namespace: str,
        geometry: Mapping[str, str],
        make: MakeStore,
        memory: Sequence[Bytes1D] = (),
    ) -> None:
        self.config = config
        self.namespace = namespace
        self._make = make
        self._settings = StoreSettings(
            namespace=space_of(namespace, geometry),
            options=config.options,
            memory=memory,
            exists_timeout_s=config.exists_timeout_s,
            get_timeout_s=config.get_timeout_s,
            put_timeout_s=config.put_timeout_s,
        )
        self._tally = Tally()
        self._opening = threading.Lock()
        self._store: PageStore | None = None
        self._failure: PoolError | None = None
        self._quiet_until_s = 0.0
        self._pause_s = 0.0
        self._closed = False

    @property
    def counters(self) -> ClientCounters:
        """The totals of this client."""
        return self._tally.counters

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """See `PageStore`."""
        return self._mask(keys, lambda store: store.exists(keys))

    def get(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffers], share: SharedReads | None = None
    ) -> list[bool]:
        """See `PageStore`. `share` is not used: each rank reads for itself. Raises PageMismatch."""
        page_bytes = check_pages(keys, pages)
        found = self._mask(keys, lambda store: store.get(keys, pages))
        read = sum(found)
        self._tally.add(pages_read=read, pages_missed=len(keys) - read, bytes_read=read * page_bytes)
        return found

    def put(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> list[bool]:
        """See `PageStore`. Raises PageMismatch."""
        page_bytes = check_pages(keys, pages)
        stored = self._mask(keys, lambda store: store.put(keys, pages))
        written = sum(stored)
        refused = 0 if self._failure is not None else len(keys) - written
        self._tally.add(pages_written=written, pages_refused=refused, bytes_written=written * page_bytes)
        return stored

    def clear(self) -> int:
        """See `PageStore`. 0 where the store cannot be reached."""
        try:
            return self._ask(lambda store: store.clear())
        except PoolError:
            return 0

    def check(self) -> dict[str, PoolError | None]:
        """See `PageStore`; by the engine's name where it cannot be reached at all."""

        def serving(store: PageStore) -> dict[str, PoolError | None]:
            outcome = store.check()
            errors = [error for error in outcome.values() if error is not None]
            if errors and len(errors) == len(outcome):
                raise errors[0]
            return outcome

        try:
            return self._ask(serving)
        except PoolError as error:
            return {self.config.engine: error}

    def expected_read_s(self, keys: Sequence[bytes]) -> float:
        """Unknown."""
        return 0.0

    def left_to_compute(self, pages: int) -> None:
        """Count pages that are there, and that the worker computes again all the same."""
        self._tally.add(pages_left=pages)

    def close(self) -> None:
        """Idempotent. What is asked later is a miss."""
        self._closed = True
        with self._opening:
            store, self._store = self._store, None
        if store is not None:
            store.close()

    def _mask(self, keys: Sequence[bytes], work: Callable[[PageStore], list[bool]]) -> list[bool]:
        def whole(store: PageStore) -> list[bool]:
            mask = work(store)
            if len(mask) != len(keys):
                raise PoolRefused(f"{self.config.engine} answered {len(mask)} of {len(keys)} pages")
            return mask

        if keys:
            try:
                return self._ask(whole)
            except PoolError as error:
                logger.debug("%s: %s", self.config.engine, error)
        return [False] * len(keys)

    def _ask(self, work: Callable[[PageStore], T]) -> T:
        """Raises PoolError. A failure begins a pause: as long as the call took, or the one before twice."""
        if self._closed:
            raise PoolUnavailable("the client is closed")
        began_s = time.monotonic()
        if began_s < self._quiet_until_s and self._failure is not None:
            raise self._failure.with_traceback(None)  # else each raise would make it longer
        try:
            answer = work(self._opened())
        except PoolError as error:
            self._failed(error, began_s)
            raise
        except Exception as error:  # boundary: code of another package; a fault of it is a miss
            failure = PoolRefused(
                f"{self.config.engine} failed (a bug of it): {type(error).__name__}: {error}"
            )
            self._failed(failure, began_s)
            logger.exception("%s", failure)
            raise failure from error
        if self._failure is not None:
            logger.info("the store %s answers again", self.config.engine)
        self._failure, self._pause_s = None, 0.0
        return answer

    def _opened(self) -> PageStore:
        """Raises PoolError."""
        store = self._store
        if store is not None:
            return store
        with self._opening:
            if self._closed:
                raise PoolUnavailable("the client is closed")
            if self._store is None:
                try:
                    self._store = self._make(self._settings)
                except ConfigError as error:  # the worker's start has checked it: something changed since
                    raise PoolRefused(str(error)) from error
            return self._store

    def _failed(self, error: PoolError, began_s: float) -> None:
        now_s = time.monotonic()
        if self._failure is None:
            logger.warning(
                "the store %s failed; pages are missed until it answers: %s", self.config.engine, error
            )
        wanted = max(self.config.retry_after_s, 2 * self._pause_s, now_s - began_s)
        self._pause_s = min(MAX_PAUSE_S, wanted)
        self._failure, self._quiet_until_s = error, now_s + self._pause_s
        self._tally.add(failures=1)


def space_of(namespace: str, geometry: Mapping[str, str]) -> str:
    """The namespace at a store that compares no geometries: workers whose pages differ do not meet."""
    text = json.dumps(dict(geometry), sort_keys=True).encode()
    return f"{namespace}+{hashlib.sha256(text).hexdigest()[:16]}"
