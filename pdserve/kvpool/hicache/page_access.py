"""One rank's pages in the pool: chains of page hashes and parts of pages, moved, measured and counted.

SGLang's storage threads move pages themselves. For pages of this host a batch is a few messages and one
native call (kvpool/native), which leaves the interpreter to the scheduler.

A rank's page is one page of the pool, or several: pieces of equal size, each with a name of its own. Workers
whose ranks hold more heads so share pages with workers whose ranks hold fewer. A page of the rank is there
when all of its pieces are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from itertools import islice

import torch

from pdserve.errors import PoolError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.hicache.client_metrics import ClientMetrics
from pdserve.kvpool.hicache.host_pool import HostPool
from pdserve.pages import pool_key


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
