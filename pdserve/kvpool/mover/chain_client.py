"""A pool client for one rank of SGLang: chains of page hashes, measured and counted."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from pdserve.errors import PoolError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.mover.client_metrics import ClientMetrics
from pdserve.kvpool.protocol.page_bytes import PageBuffers
from pdserve.pages import pool_key


class Moved(NamedTuple):
    """For each page whether it is where it was to go now."""

    done: list[bool]
    from_ssd: int = 0  # of a read: pages that came from a tier below memory
    written: int = 0  # of a write: pages that were neither there already nor another's


class ChainClient:
    """`suffix`: of the rank, in the names of its pages. Keys are SGLang's, in hex."""

    def __init__(self, client: PoolClient, suffix: bytes) -> None:
        self.client = client
        self._suffix = suffix
        self._metrics = ClientMetrics()

    def exists(self, keys: Sequence[str]) -> int:
        """How many pages of the chain, from its start, the pool has. Raises ValueError: a key is not hex."""
        present = self.client.exists(self._names(keys))
        self._publish()
        return present.index(False) if False in present else len(present)

    def get(self, keys: Sequence[str], pages: Sequence[PageBuffers]) -> Moved:
        """As `PoolClient.get`. Raises ValueError, PageMismatch."""
        before = self.client.counters.pages_ssd
        with self._metrics.timed("read"):
            done = self.client.get(self._names(keys), pages)
        self._publish()
        return Moved(done, self.client.counters.pages_ssd - before)

    def put(self, keys: Sequence[str], pages: Sequence[PageBuffers]) -> Moved:
        """As `PoolClient.put`. Raises ValueError, PageMismatch."""
        before = self.client.counters.pages_written
        with self._metrics.timed("written"):
            done = self.client.put(self._names(keys), pages)
        self._publish()
        return Moved(done, written=self.client.counters.pages_written - before)

    def clear(self) -> int:
        """As `PoolClient.clear`."""
        return self.client.clear()

    def check(self) -> dict[str, PoolError | None]:
        """As `PoolClient.check`."""
        return self.client.check()

    def close(self) -> None:
        """As `PoolClient.close`."""
        self.client.close()

    def _names(self, keys: Sequence[str]) -> list[bytes]:
        return [pool_key(bytes.fromhex(key), self._suffix) for key in keys]

    def _publish(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the metrics' directory may be full or gone
            self._metrics.publish(self.client.counters)
