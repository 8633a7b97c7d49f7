"""What a worker's HTTP process asks of the pool, and a client that asks a store of another engine by polling.

A pool node reports a commit to whoever waits for it. Other stores do not. So a wait asks again and again
until the pages are there or the time is over: after 5 ms at first, every 50 ms at last. Calls of a store
block, so a few threads hand them to a process beside this one (beside.py). A call that is late counts as
absent pages. While too many are late, further questions are answered with "not there" at once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, Protocol, TypeAlias, TypeVar

from pdserve.errors import PoolError, PoolTimeout
from pdserve.kvpool.client.async_client import AsyncPoolClient, Place
from pdserve.kvpool.client.config import OWN_ENGINE, PoolClientConfig
from pdserve.kvpool.mover.beside import open_beside
from pdserve.kvpool.protocol.messages import Fate
from pdserve.kvpool.stores.base import PageStore
from pdserve.tracing import timed

logger = logging.getLogger(__name__)
T = TypeVar("T")
OpenStore: TypeAlias = Callable[[PoolClientConfig, str, dict[str, str]], PageStore]

FIRST_POLL_S: Final = 0.005
LAST_POLL_S: Final = 0.05
POLL_GROWTH: Final = 1.5
POLLS_OF_A_CHECK: Final = 10
"""After so many polls of a wait the store is asked whether it is there at all."""
THREADS: Final = 4
MAX_QUEUED: Final = 256
"""Questions that run or wait for a thread. Each request in a worker asks one at a time."""


class AsyncPageClient(Protocol):
    """An `AsyncPoolClient` or a `PolledClient`. Used in one event loop. Faults of the pool are misses."""

    config: PoolClientConfig
    namespace: str
    geometry: dict[str, str]

    async def exists(self, keys: Sequence[bytes]) -> list[bool]: ...
    async def wait(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]: ...
    async def places(self, keys: Sequence[bytes]) -> list[Place | None]: ...
    async def fates(self, keys: Sequence[bytes]) -> list[Fate | None]: ...
    async def keep(self, keys: Sequence[bytes], keep_s: float) -> int: ...
    async def raise_pages(self, keys: Sequence[bytes], timeout_s: float) -> int: ...
    async def demote(self, keys: Sequence[bytes]) -> int: ...
    async def check(self) -> dict[str, PoolError | None]: ...
    def use(self, namespace: str, geometry: dict[str, str]) -> None: ...
    def close(self) -> None: ...


def open_async_client(config: PoolClientConfig, namespace: str, geometry: dict[str, str]) -> AsyncPageClient:
    """The client of the configured engine. Connects lazily. Raises ConfigError."""
    if config.engine == OWN_ENGINE:
        return AsyncPoolClient(config, namespace, geometry)
    return PolledClient(config, namespace, geometry, partial(open_beside, name="worker"))


class PolledClient:
    """One namespace of a store. See `AsyncPoolClient` for what the calls mean."""

    def __init__(
        self, config: PoolClientConfig, namespace: str, geometry: dict[str, str], open_store: OpenStore
    ) -> None:
        self.config = config
        self.namespace = namespace
        self.geometry = geometry
        self._open_store = open_store
        self._client = open_store(config, namespace, geometry)
        self._threads = ThreadPoolExecutor(THREADS, "pdserve-store")
        self._places = threading.Semaphore(MAX_QUEUED)
        self._closed = False

    async def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key: whether it is committed. False where the store does not say in time."""
        with timed("pool exists", pages=len(keys)):
            return await self._exists(keys, self.config.exists_timeout_s)

    async def wait(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        """Wait until all keys are committed, for at most `timeout_s`. Returns whether each key is. A store
        that cannot be reached is not waited for.
        """
        with timed("pool wait", pages=len(keys)):
            return await self._wait(keys, time.monotonic() + timeout_s)

    async def places(self, keys: Sequence[bytes]) -> list[Place | None]:
        """For each key: the engine, which does not say more; None: nowhere."""
        here = Place(self.config.engine, self.config.engine)
        return [here if there else None for there in await self.exists(keys)]

    async def fates(self, keys: Sequence[bytes]) -> list[Fate | None]:
        """Nobody tells."""
        return [None] * len(keys)

    async def keep(self, keys: Sequence[bytes], keep_s: float) -> int:
        """No page can be kept: none is."""
        return 0

    async def raise_pages(self, keys: Sequence[bytes], timeout_s: float) -> int:
        """The store has its own rules of where pages are."""
        return 0

    async def demote(self, keys: Sequence[bytes]) -> int:
        """As for `raise_pages`."""
        return 0

    async def check(self) -> dict[str, PoolError | None]:
        """Whether the store serves the namespace."""
        try:
            return await self._ask(lambda client: client.check(), self.config.connect_timeout_s)
        except PoolError as error:
            return {self.config.engine: error}

    def use(self, namespace: str, geometry: dict[str, str]) -> None:
        """Ask about another namespace from now on. Operations in progress end with misses."""
        self._retire(self._client)
        self.namespace, self.geometry = namespace, geometry
        self._client = self._open_store(self.config, namespace, geometry)

    def close(self) -> None:
        """Idempotent. Operations in progress end with misses."""
        if not self._closed:
            self._closed = True
            self._retire(self._client)
            self._threads.shutdown(wait=False)

    def _retire(self, client: PageStore) -> None:
        self._threads.submit(client.close)  # it may block

    async def _wait(self, keys: Sequence[bytes], until_s: float) -> list[bool]:
        result = [False] * len(keys)
        missing = list(range(len(keys)))
        pause_s = FIRST_POLL_S
        polls = 0
        while missing:
            limit_s = min(self.config.exists_timeout_s, max(FIRST_POLL_S, until_s - time.monotonic()))
            found = await self._exists([keys[i] for i in missing], limit_s)
            for place, there in zip(missing, found, strict=True):
                result[place] = there
            missing = [i for i in missing if not result[i]]
            left_s = until_s - time.monotonic()
            if not missing or left_s <= 0 or self._closed:
                break
            if polls % POLLS_OF_A_CHECK == 0 and any((await self.check()).values()):
                break
            polls += 1
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(LAST_POLL_S, POLL_GROWTH * pause_s)
        return result

    async def _exists(self, keys: Sequence[bytes], limit_s: float) -> list[bool]:
        if keys:
            try:
                return await self._ask(lambda client: client.exists(keys), limit_s)
            except PoolError as error:
                logger.debug("%s: %s", self.config.engine, error)
        return [False] * len(keys)

    async def _ask(self, work: Callable[[PageStore], T], limit_s: float) -> T:
        """Raises PoolTimeout."""
        client = self._client
        if self._closed or not self._places.acquire(blocking=False):
            raise PoolTimeout(f"the store {self.config.engine} is busy")
        future = self._threads.submit(work, client)
        future.add_done_callback(lambda _: self._places.release())
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), limit_s)
        except TimeoutError:
            raise PoolTimeout(f"the store {self.config.engine} did not answer in time") from None
