"""A pool client for one rank of SGLang: chains of page hashes and parts of pages, measured and counted."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pdserve.errors import PoolError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.mover.client_metrics import ClientMetrics
from pdserve.kvpool.protocol.page_bytes import PageBuffers
from pdserve.pages import KV, pool_key


class Moved(NamedTuple):
    """For each page whether it is where it was to go now."""

    done: list[bool]
    from_ssd: int = 0  # of a read: pages that came from a tier below memory
    written: int = 0  # of a write: pages that were neither there already nor another's


class ChainClient:
    """`suffixes`: of the names of this rank's pages, by part. Keys are SGLang's, in hex. All calls raise
    ValueError where a key is not hex, KeyError for an unknown part.
    """

    def __init__(self, client: PoolClient, suffixes: Mapping[str, bytes]) -> None:
        self.client = client
        self._suffixes = suffixes
        self._metrics = ClientMetrics()

    def present(self, keys: Sequence[str], parts: Sequence[str] = (KV,)) -> list[list[bool]]:
        """For each part and each page: whether the pool has it. One question to the pool for all."""
        found = self.client.exists([name for part in parts for name in self._names(keys, part)])
        self._publish()
        count = len(keys)
        return [found[number * count : (number + 1) * count] for number in range(len(parts))]

    def get(self, keys: Sequence[str], pages: Sequence[PageBuffers], part: str = KV) -> Moved:
        """As `PoolClient.get`. Raises PageMismatch."""
        before = self.client.counters.pages_ssd
        with self._metrics.timed("read"):
            done = self.client.get(self._names(keys, part), pages)
        self._publish()
        return Moved(done, self.client.counters.pages_ssd - before)

    def put(self, keys: Sequence[str], pages: Sequence[PageBuffers], part: str = KV) -> Moved:
        """As `PoolClient.put`. Raises PageMismatch."""
        before = self.client.counters.pages_written
        with self._metrics.timed("written"):
            done = self.client.put(self._names(keys, part), pages)
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

    def _names(self, keys: Sequence[str], part: str) -> list[bytes]:
        suffix = self._suffixes[part]
        return [pool_key(bytes.fromhex(key), suffix) for key in keys]

    def _publish(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the metrics' directory may be full or gone
            self._metrics.publish(self.client.counters)
