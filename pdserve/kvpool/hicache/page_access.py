"""How a storage backend reaches the pool: through a page mover, or with a client in the scheduler's process.

The mover is taken where SGLang's host pool has descriptors that another process can map. Elsewhere (host
memory of other devices, huge pages) the pages are copied in the scheduler's process, which is slow beside a
busy scheduler.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch

from pdserve.errors import PageMismatch, PoolError, PoolUnavailable
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.mover.chain_client import ChainClient, Moved
from pdserve.kvpool.mover.client import MoverClient
from pdserve.kvpool.mover.client_metrics import ClientMetrics
from pdserve.kvpool.mover.host_pages import HostPages, learn_segments
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers

logger = logging.getLogger(__name__)

PROBED_PAGES: Final = 64  # whose addresses show how a host pool is laid out


class PageAccess(Protocol):
    """One rank's pages in the pool. Keys are SGLang's, in hex; `host_indices` int64 [pages * page_size]."""

    def exists(self, keys: Sequence[str]) -> int:
        """How many pages of the chain, from its start, the pool has."""
        ...

    def get(self, keys: Sequence[str], host_indices: torch.Tensor) -> Moved:
        """Read pages into the host pool."""
        ...

    def put(self, keys: Sequence[str], host_indices: torch.Tensor) -> Moved:
        """Write pages from the host pool."""
        ...

    def clear(self) -> int:
        """Drop the namespace's pages. Returns their number."""
        ...

    def check(self) -> dict[str, PoolError | None]:
        """For each node: None, or why it does not serve us."""
        ...

    def close(self) -> None:
        """Close all connections. Idempotent."""
        ...


def open_access(
    config: PoolClientConfig,
    namespace: str,
    geometry: dict[str, str],
    host_pool: Any,
    suffix: bytes,
    name: str,
) -> PageAccess:
    """The access to the pool for SGLang's host pool. Raises ConfigError, StartupError."""
    if config.page_mover:
        host = host_pages(host_pool)
        if host is not None:
            mover = MoverClient(config, namespace, geometry, host, suffix=suffix, name=name)
            logger.info("page mover %s moves the pages of %s", mover.pid, name)
            return ByMover(mover, host.page_tokens)
        text = "SGLang's host pool cannot be shared with another process: its scheduler moves pages itself"
        logger.warning(text)
    _, sizes = host_pool.get_page_buffer_meta(torch.arange(int(host_pool.page_size)))
    client = PoolClient(config, namespace, geometry, name=name, page_bytes=sum(sizes))
    return InProcess(ChainClient(client, suffix), host_pool)


def host_pages(host_pool: Any) -> HostPages | None:
    """Where the pages lie, if SGLang made the host pool from descriptors (`"allocator": "shm"`)."""
    allocator = getattr(host_pool, "allocator", None)
    fds, mappings = getattr(allocator, "fds", []), getattr(allocator, "mms", [])
    tokens = int(host_pool.page_size)
    if not fds or len(fds) != len(mappings):
        return None
    pages = int(host_pool.size) // tokens
    probed = [
        host_pool.get_page_buffer_meta(torch.arange(page * tokens, (page + 1) * tokens))
        for page in range(min(pages, PROBED_PAGES))
    ]
    regions = [(np.frombuffer(mapping, np.uint8).ctypes.data, len(mapping)) for mapping in mappings]
    segments = learn_segments([one[0] for one in probed], [one[1] for one in probed], regions)
    if segments is None:
        return None
    memory = [(fd, size) for fd, (_, size) in zip(fds, regions, strict=True)]
    host = HostPages(memory, segments, tokens, pages)
    return host if host.fits() else None


class ByMover:
    """`PageAccess` by a page mover. The scheduler's thread does as little as can be: it holds its interpreter
    up meanwhile.
    """

    def __init__(self, mover: MoverClient, page_tokens: int) -> None:
        self.mover = mover
        self._page_tokens = page_tokens
        self._metrics = ClientMetrics()
        self.clear = mover.clear
        self.check = mover.check
        self.close = mover.close

    def exists(self, keys: Sequence[str]) -> int:
        """See `PageAccess`. Raises PoolUnavailable."""
        try:
            return self.mover.exists(keys)
        except PoolUnavailable:
            self._metrics.mover_failed()
            raise

    def get(self, keys: Sequence[str], host_indices: torch.Tensor) -> Moved:
        """See `PageAccess`. Raises PageMismatch, PoolUnavailable."""
        return self._move(self.mover.get, keys, host_indices)

    def put(self, keys: Sequence[str], host_indices: torch.Tensor) -> Moved:
        """See `PageAccess`. Raises PageMismatch, PoolUnavailable."""
        return self._move(self.mover.put, keys, host_indices)

    def _move(
        self, move: Callable[[Sequence[str], bytes], Moved], keys: Sequence[str], host_indices: torch.Tensor
    ) -> Moved:
        try:
            return move(keys, self._first_tokens(keys, host_indices))
        except PoolUnavailable:
            self._metrics.mover_failed()
            raise

    def _first_tokens(self, keys: Sequence[str], host_indices: torch.Tensor) -> bytes:
        _check_length(keys, host_indices, self._page_tokens)
        return host_indices.numpy()[:: self._page_tokens].tobytes()


class InProcess:
    """`PageAccess` by a client in this process."""

    def __init__(self, chains: ChainClient, host_pool: Any) -> None:
        self._chains = chains
        self._host_pool = host_pool
        self.exists = chains.exists
        self.clear = chains.clear
        self.check = chains.check
        self.close = chains.close

    def get(self, keys: Sequence[str], host_indices: torch.Tensor) -> Moved:
        """See `PageAccess`. Raises PageMismatch."""
        return self._chains.get(keys, self._buffers(keys, host_indices))

    def put(self, keys: Sequence[str], host_indices: torch.Tensor) -> Moved:
        """See `PageAccess`. Raises PageMismatch."""
        return self._chains.put(keys, self._buffers(keys, host_indices))

    def _buffers(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[PageBuffers]:
        _check_length(keys, host_indices, int(self._host_pool.page_size))
        addresses, sizes = self._host_pool.get_page_buffer_meta(host_indices)
        segments, rest = divmod(len(addresses), len(keys) or 1)
        if rest:
            raise PageMismatch(f"{len(addresses)} segments for {len(keys)} pages")
        views = [_view(address, size) for address, size in zip(addresses, sizes, strict=True)]
        return [views[start : start + segments] for start in range(0, len(views), segments or 1)]


def _check_length(keys: Sequence[str], host_indices: torch.Tensor, page_tokens: int) -> None:
    if len(host_indices) != len(keys) * page_tokens:
        raise PageMismatch(f"{len(host_indices)} indices for {len(keys)} pages of {page_tokens} tokens")


def _view(address: int, size_bytes: int) -> Bytes1D:
    """The host pool's memory at `address` as uint8 [size_bytes]; SGLang keeps it alive as long as it uses
    us.
    """
    return np.frombuffer(memoryview((ctypes.c_uint8 * size_bytes).from_address(address)), dtype=np.uint8)
