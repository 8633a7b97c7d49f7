"""How a storage backend reaches the pool: through a page mover, or with a client in the scheduler's process.

The mover is taken where all of SGLang's host pools have descriptors that another process can map. Elsewhere
(host memory of other devices, huge pages) the pages are copied in the scheduler's process, which is slow
beside a busy scheduler.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import torch

from pdserve.errors import PageMismatch, PoolError, PoolUnavailable
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.mover.chain_client import ChainClient, Moved
from pdserve.kvpool.mover.client import MoverClient
from pdserve.kvpool.mover.client_metrics import ClientMetrics
from pdserve.kvpool.mover.host_pages import HostPages, HostPart, learn_segments
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers

logger = logging.getLogger(__name__)
T = TypeVar("T")

PROBED_PAGES: Final = 64  # whose addresses show how a host pool is laid out


@dataclass(frozen=True)
class HostPool:
    """SGLang's host pool of one part, and what the keys of its pages' pieces end with."""

    pool: Any
    suffixes: tuple[bytes, ...]
    is_replicated: bool = False  # all ranks hold the same bytes


class PageAccess(Protocol):
    """One rank's pages in the pool. Keys are SGLang's, in hex; `host_indices` int64 [pages * page_size]."""

    def present(self, keys: Sequence[str], parts: Sequence[str]) -> list[list[bool]]:
        """For each part and each page: whether the pool has it."""
        ...

    def get(self, part: str, keys: Sequence[str], host_indices: torch.Tensor) -> Moved:
        """Read pages into the part's host pool."""
        ...

    def put(self, part: str, keys: Sequence[str], host_indices: torch.Tensor) -> Moved:
        """Write pages from the part's host pool."""
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
    pools: Mapping[str, HostPool],
    name: str,
    ranks: str = "",
) -> PageAccess:
    """The access to the pool for SGLang's host pools, by part. `ranks`: the group of ranks on this host that
    read replicated parts together, which page movers do. Raises ConfigError, StartupError.
    """
    parts = host_parts(pools)
    if parts is not None:
        mover = MoverClient(config, namespace, geometry, parts, name=name, ranks=ranks)
        logger.info("page mover %s moves the pages of %s", mover.pid, name)
        return ByMover(mover, {part: host.pages.page_tokens for part, host in parts.items()})
    logger.warning(
        "SGLang's host pool cannot be shared with another process: its scheduler moves pages itself"
    )
    largest = max(page_bytes(host.pool) // len(host.suffixes) for host in pools.values())
    client = PoolClient(config, namespace, geometry, name=name, page_bytes=largest)
    suffixes = {part: host.suffixes for part, host in pools.items()}
    chains = ChainClient(client, suffixes)
    return InProcess(chains, {part: host.pool for part, host in pools.items()})


def host_parts(pools: Mapping[str, HostPool]) -> dict[str, HostPart] | None:
    """Where the pages of all parts lie. None: one of the host pools cannot be shared."""
    parts = {}
    for part, host in pools.items():
        pages = host_pages(host.pool)
        if pages is None:
            return None
        parts[part] = HostPart(pages, host.suffixes, host.is_replicated)
    return parts


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

    def __init__(self, mover: MoverClient, page_tokens: Mapping[str, int]) -> None:
        """`page_tokens`: indices of a page in the host pool of each part."""
        self.mover = mover
        self._page_tokens = page_tokens
        self._metrics = ClientMetrics()
        self.clear = mover.clear
        self.check = mover.check
        self.close = mover.close

    def present(self, keys: Sequence[str], parts: Sequence[str]) -> list[list[bool]]:
        """See `PageAccess`. Raises PoolUnavailable."""
        return self._counted(lambda: self.mover.present(keys, parts))

    def get(self, part: str, keys: Sequence[str], host_indices: torch.Tensor) -> Moved:
        """See `PageAccess`. Raises PageMismatch, PoolUnavailable."""
        first = self._first_tokens(part, keys, host_indices)
        return self._counted(lambda: self.mover.get(keys, first, part))

    def put(self, part: str, keys: Sequence[str], host_indices: torch.Tensor) -> Moved:
        """See `PageAccess`. Raises PageMismatch, PoolUnavailable."""
        first = self._first_tokens(part, keys, host_indices)
        return self._counted(lambda: self.mover.put(keys, first, part))

    def _counted(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except PoolUnavailable:
            self._metrics.mover_failed()
            raise

    def _first_tokens(self, part: str, keys: Sequence[str], host_indices: torch.Tensor) -> bytes:
        tokens = self._page_tokens[part]
        _check_length(keys, host_indices, tokens)
        return host_indices.numpy()[::tokens].tobytes()


class InProcess:
    """`PageAccess` by a client in this process."""

    def __init__(self, chains: ChainClient, host_pools: Mapping[str, Any]) -> None:
        self._chains = chains
        self._host_pools = host_pools
        self.present = chains.present
        self.clear = chains.clear
        self.check = chains.check
        self.close = chains.close

    def get(self, part: str, keys: Sequence[str], host_indices: torch.Tensor) -> Moved:
        """See `PageAccess`. Raises PageMismatch."""
        return self._chains.get(keys, self._buffers(part, keys, host_indices), part)

    def put(self, part: str, keys: Sequence[str], host_indices: torch.Tensor) -> Moved:
        """See `PageAccess`. Raises PageMismatch."""
        return self._chains.put(keys, self._buffers(part, keys, host_indices), part)

    def _buffers(self, part: str, keys: Sequence[str], host_indices: torch.Tensor) -> list[PageBuffers]:
        host_pool = self._host_pools[part]
        _check_length(keys, host_indices, int(host_pool.page_size))
        addresses, sizes = host_pool.get_page_buffer_meta(host_indices)
        segments, rest = divmod(len(addresses), len(keys) or 1)
        if rest:
            raise PageMismatch(f"{len(addresses)} segments for {len(keys)} pages")
        views = [_view(address, size) for address, size in zip(addresses, sizes, strict=True)]
        return [views[start : start + segments] for start in range(0, len(views), segments or 1)]


def page_bytes(host_pool: Any) -> int:
    """The length of its pages. Raises ValueError, NotImplementedError: it has no addresses of pages."""
    _, sizes = host_pool.get_page_buffer_meta(torch.arange(int(host_pool.page_size)))
    return sum(sizes)


def _check_length(keys: Sequence[str], host_indices: torch.Tensor, page_tokens: int) -> None:
    if len(host_indices) != len(keys) * page_tokens:
        raise PageMismatch(f"{len(host_indices)} indices for {len(keys)} pages of {page_tokens} tokens")


def _view(address: int, size_bytes: int) -> Bytes1D:
    """The host pool's memory at `address` as uint8 [size_bytes]; SGLang keeps it alive as long as it uses
    us.
    """
    return np.frombuffer(memoryview((ctypes.c_uint8 * size_bytes).from_address(address)), dtype=np.uint8)
