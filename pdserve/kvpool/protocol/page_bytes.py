"""A page's bytes in memory, and their checksum: XXH3-64 over the bytes in order, however they are cut. Pure.

The writer computes the checksum, the reader checks it, the node only carries it. 0 means "no checksum". A
page whose digest is 0 has checksum 1; this adds 2^-64 to the chance of a collision, which is 2^-64 anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

NO_CHECKSUM = 0
MEMORY_PAGE_BYTES = 4096


def aligned(size_bytes: int) -> Bytes1D:
    """Memory to copy a page into, not initialised: uint8, shape [size_bytes], at the start of a memory page.

    NumPy's own lies 16 bytes behind one. Copies from a page of the arena into that take four times as long on
    AMD's processors (`rep movsb` with such offsets).
    """
    memory = np.empty(size_bytes + MEMORY_PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % MEMORY_PAGE_BYTES
    return memory[start : start + size_bytes]


def checksum_page(segments: Sequence[Bytes1D]) -> int:
    """XXH3-64 of the segments' bytes one after the other, in [1, 2^64).

    `segments` are contiguous uint8 arrays. The GIL is released while a large segment is hashed.
    """
    if len(segments) == 1:
        return checksum_bytes(segments[0].data)
    digest = xxhash.xxh3_64()
    for segment in segments:
        digest.update(segment.data)
    return finish(digest)


def checksum_bytes(data: bytes | bytearray | memoryview) -> int:
    """The checksum of a page in one piece."""
    return int(xxhash.xxh3_64_intdigest(data)) or 1


def start() -> xxhash.xxh3_64:
    """A running checksum: `.update(piece)` hashes each piece while it is in the CPU's cache."""
    return xxhash.xxh3_64()


def finish(digest: xxhash.xxh3_64) -> int:
    """The value of a running checksum, never 0."""
    return int(digest.intdigest()) or 1


Bytes1D: TypeAlias = npt.NDArray[np.uint8]

# One page in the caller's memory: its segments in order, each 1-D, contiguous, uint8. A read writes into
# them.
PageBuffers: TypeAlias = Sequence[Bytes1D]
