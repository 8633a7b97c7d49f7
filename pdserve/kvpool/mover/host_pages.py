"""SGLang's host pools as another process sees them: regions of shared memory, and where pages lie in them.

Every page consists of the same segments (two for page_first layouts, 2 x layers for layer_first, one for
MLA). The segments of neighbouring pages have constant distances, so a page's number says where they are.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import msgspec
import numpy as np

from pdserve.errors import PageMismatch
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers
from pdserve.kvpool.transports.page_residency import populate_in_background, unmap_in_background


class Segment(msgspec.Struct, frozen=True):
    """One segment of all pages: of page p it begins at `offset + p * stride` in its region. In bytes."""

    region: int
    offset: int
    stride: int
    size: int


class HostPages(msgspec.Struct, frozen=True):
    """A host pool of `pages` pages of `page_tokens` tokens each."""

    memory: list[tuple[int, int]]  # (descriptor, bytes) of each region
    segments: list[Segment]
    page_tokens: int
    pages: int

    @property
    def page_bytes(self) -> int:
        """The length of a page."""
        return sum(one.size for one in self.segments)

    def fits(self) -> bool:
        """Whether all pages are inside the regions."""
        last = self.pages - 1
        return self.pages > 0 and all(
            0 <= one.region < len(self.memory)
            and min(one.offset, one.offset + last * one.stride) >= 0
            and max(one.offset, one.offset + last * one.stride) + one.size <= self.memory[one.region][1]
            for one in self.segments
        )


class HostPart(msgspec.Struct, frozen=True):
    """A host pool that holds one part of pages. `suffixes`: of the keys of its pages' pieces."""

    pages: HostPages
    suffixes: tuple[bytes, ...] = (b"",)
    is_replicated: bool = False  # all ranks hold the same bytes


class MappedHostPages:
    """The same memory in this process."""

    def __init__(self, host: HostPages, *, writable: bool = True) -> None:
        """Raises OSError, ValueError; PageMismatch: the pages are not inside the memory."""
        if not host.fits():
            raise PageMismatch("the pages of the host pool are not inside its memory")
        self._host = host
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._regions: list[Bytes1D] = [
            np.frombuffer(mmap.mmap(fd, size, prot=access), np.uint8) for fd, size in host.memory
        ]
        if writable:
            for region in self._regions:
                populate_in_background(region)

    @property
    def regions(self) -> list[Bytes1D]:
        """The memory, region by region."""
        return list(self._regions)

    def buffers(self, indices: bytes) -> list[PageBuffers]:
        """The segments of pages. `indices`: the number of the first token of each, int64 [pages].

        Raises PageMismatch: one is not the first token of a page of the pool.
        """
        pages, rest = np.divmod(np.frombuffer(indices, np.int64), self._host.page_tokens)
        if rest.any() or (pages.size and not 0 <= int(pages.min()) <= int(pages.max()) < self._host.pages):
            raise PageMismatch("a page lies outside of the host pool")
        return [self.page(number) for number in pages.tolist()]

    def page(self, number: int) -> PageBuffers:
        """The segments of a page. Raises PageMismatch: there is none of this number."""
        if not 0 <= number < self._host.pages:
            raise PageMismatch("a page lies outside of the host pool")
        return [self._segment(one, number) for one in self._host.segments]

    def number(self, page: PageBuffers) -> int:
        """The number of the page that these segments are, as `page` gives them."""
        first = self._host.segments[0]
        offset = page[0].ctypes.data - self._regions[first.region].ctypes.data - first.offset
        return int(offset // first.stride)

    def let_go(self) -> None:
        """Unmap the memory once nothing uses it, without a pause of this process."""
        for region in self._regions:
            unmap_in_background(region)

    def _segment(self, segment: Segment, page: int) -> Bytes1D:
        start = segment.offset + page * segment.stride
        return self._regions[segment.region][start : start + segment.size]


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
