"""A pool client for one rank of SGLang: chains of page hashes and parts of pages, measured and counted.

A rank's page is one page of the pool, or several: pieces of equal size, each with a name of its own. Workers
whose ranks hold more heads so share pages with workers whose ranks hold fewer. A page of the rank is there
when all of its pieces are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from pdserve.errors import PageMismatch, PoolError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.operations import SharedReads
from pdserve.kvpool.mover.client_metrics import ClientMetrics
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers
from pdserve.pages import KV, pool_key


class Moved(NamedTuple):
    """For each page whether it is where it was to go now."""

    done: list[bool]
    written: int = 0  # of a write: pieces that were neither there already nor another's


class ChainClient:
    """`suffixes`: of the names of the pieces of this rank's pages, by part. Keys are SGLang's, in hex. All
    calls raise ValueError where a key is not hex, KeyError for an unknown part.
    """

    def __init__(
        self,
        client: PoolClient,
        suffixes: Mapping[str, Sequence[bytes]],
        shares: Mapping[str, SharedReads] | None = None,
    ) -> None:
        """`shares`: by part, the other ranks of this host that read the same pages."""
        self.client = client
        self._suffixes = suffixes
        self._shares = shares or {}
        self._metrics = ClientMetrics()

    def present(self, keys: Sequence[str], parts: Sequence[str] = (KV,)) -> list[list[bool]]:
        """For each part and each page: whether the pool has it. One question to the pool for all."""
        names = [self._names(keys, part) for part in parts]
        found = iter(self.client.exists([name for ours in names for name in ours]))
        present = [
            self._whole(list(islice(found, len(ours))), part) for part, ours in zip(parts, names, strict=True)
        ]
        self._publish()
        return present

    def get(self, keys: Sequence[str], pages: Sequence[PageBuffers], part: str = KV) -> Moved:
        """As `PoolClient.get`. Raises PageMismatch."""
        with self._metrics.timed("read"):
            done = self.client.get(self._names(keys, part), self._pieces(pages, part), self._shares.get(part))
        self._publish()
        return Moved(self._whole(done, part))

    def put(self, keys: Sequence[str], pages: Sequence[PageBuffers], part: str = KV) -> Moved:
        """As `PoolClient.put`. Raises PageMismatch."""
        before = self.client.counters.pages_written
        with self._metrics.timed("written"):
            done = self.client.put(self._names(keys, part), self._pieces(pages, part))
        self._publish()
        return Moved(self._whole(done, part), written=self.client.counters.pages_written - before)

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
        hashes = [bytes.fromhex(key) for key in keys]
        return [pool_key(digest, suffix) for digest in hashes for suffix in self._suffixes[part]]

    def _pieces(self, pages: Sequence[PageBuffers], part: str) -> Sequence[PageBuffers]:
        """In the order of `_names`. Raises PageMismatch: a segment cannot be divided."""
        count = len(self._suffixes[part])
        if count == 1:
            return pages
        if any(len(segment) % count for page in pages for segment in page):
            raise PageMismatch(f"a segment of a page cannot be divided into {count} pieces")
        return [[_piece(segment, i, count) for segment in page] for page in pages for i in range(count)]

    def _whole(self, pieces: list[bool], part: str) -> list[bool]:
        """Which pages have all of their pieces."""
        count = len(self._suffixes[part])
        return [all(pieces[start : start + count]) for start in range(0, len(pieces), count)]

    def _publish(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the metrics' directory may be full or gone
            self._metrics.publish(self.client.counters)


def _piece(segment: Bytes1D, number: int, count: int) -> Bytes1D:
    length = len(segment) // count
    return segment[number * length : (number + 1) * length]
