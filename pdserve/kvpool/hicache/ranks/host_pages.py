"""SGLang's host pools as another process sees them: regions of shared memory, and where pages lie in them.

Every page consists of the same segments (two for page_first layouts, 2 x layers for layer_first, one for
MLA). The segments of neighbouring pages have constant distances, so a page's number says where they are.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from pdserve.errors import PageMismatch
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers
from pdserve.kvpool.transports.page_residency import unmap_in_background

logger = logging.getLogger(__name__)

PROBED_PAGES: Final = 64  # whose addresses show how a host pool is laid out


class Segment(msgspec.Struct, frozen=True):
    """One segment of all pages: of page p it begins at `offset + p * stride` in its region. In bytes."""

    region: int
    offset: int
    stride: int
    size: int


class HostPages(msgspec.Struct, frozen=True):
    """A host pool of `pages` pages."""

    memory: list[tuple[int, int]]  # (descriptor, bytes) of each region
    segments: list[Segment]
    pages: int

    def fits(self) -> bool:
        """Whether all pages are inside the regions."""
        last = self.pages - 1
        return self.pages > 0 and all(
            0 <= one.region < len(self.memory)
            and min(one.offset, one.offset + last * one.stride) >= 0
            and max(one.offset, one.offset + last * one.stride) + one.size <= self.memory[one.region][1]
            for one in self.segments
        )


class MappedHostPages:
    """The same memory in this process."""

    def __init__(self, host: HostPages, regions: Sequence[Bytes1D]) -> None:
        """Raises PageMismatch: the pages are not inside the memory."""
        if not host.fits():
            raise PageMismatch("the pages of the host pool are not inside its memory")
        self.host = host
        self._regions = regions

    @classmethod
    def map(cls, host: HostPages) -> MappedHostPages:
        """Map the memory for reading. Raises OSError, ValueError, PageMismatch."""
        regions = [
            np.frombuffer(mmap.mmap(fd, size, prot=mmap.PROT_READ), np.uint8) for fd, size in host.memory
        ]
        return cls(host, regions)

    def page(self, number: int) -> PageBuffers:
        """The segments of a page. Raises PageMismatch: there is none of this number."""
        if not 0 <= number < self.host.pages:
            raise PageMismatch("a page lies outside of the host pool")
        starts = ((one, one.offset + number * one.stride) for one in self.host.segments)
        return [self._regions[one.region][start : start + one.size] for one, start in starts]

    def number(self, page: PageBuffers) -> int:
        """The number of the page that these segments are, in this process's mapping."""
        first = self.host.segments[0]
        offset = page[0].ctypes.data - self._regions[first.region].ctypes.data - first.offset
        return int(offset // first.stride)

    def let_go(self) -> None:
        """Unmap the memory once nothing uses it, without a pause of this process."""
        for region in self._regions:
            unmap_in_background(region)


def shared_pages(pools: Mapping[str, Any]) -> dict[str, MappedHostPages]:
    """SGLang's host pools, by part, as other processes see them. Without those that they cannot map: SGLang
    has not made them from descriptors (`"allocator": "shm"`), or their pages are laid out in another way.
    """
    import torch

    shared = {}
    for part, pool in pools.items():
        allocator = getattr(pool, "allocator", None)
        fds, mappings = getattr(allocator, "fds", []), getattr(allocator, "mms", [])
        tokens = int(pool.page_size)
        pages = int(pool.size) // tokens
        regions = [np.frombuffer(mapping, np.uint8) for mapping in mappings]
        probed = [
            pool.get_page_buffer_meta(torch.arange(page * tokens, (page + 1) * tokens))
            for page in range(min(pages, PROBED_PAGES))
        ]
        segments = learn_segments(
            [one[0] for one in probed],
            [one[1] for one in probed],
            [(region.ctypes.data, region.size) for region in regions],
        )
        memory = [(fd, region.size) for fd, region in zip(fds, regions, strict=False)]
        host = HostPages(memory, segments or [], pages)
        if segments and host.fits():
            shared[part] = MappedHostPages(host, regions)
        else:
            logger.warning("the host pool of %s cannot be shared: each rank reads its pages by itself", part)
    return shared


def learn_segments(
    addresses: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]], regions: Sequence[tuple[int, int]]
) -> list[Segment] | None:
    """The segments of a host pool whose pages 0, 1, 2 and so on, have these addresses and sizes of segments.

    `regions`: (address, bytes) of each. None: a segment is in no region, or the distances are not constant.
    """
    if len(addresses) < 2 or any(list(one) != list(sizes[0]) for one in sizes):
        return None
    segments = []
    for place, size in enumerate(sizes[0]):
        found = [page[place] for page in addresses]
        stride = found[1] - found[0]
        if found != [found[0] + number * stride for number in range(len(found))]:
            return None
        inside = [number for number, (start, length) in enumerate(regions) if 0 <= found[0] - start < length]
        if not inside:
            return None
        segments.append(Segment(inside[0], found[0] - regions[inside[0]][0], stride, size))
    return segments
