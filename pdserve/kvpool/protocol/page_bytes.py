"""The checksum of a page: XXH3-64 over its bytes in order, whatever segments they lie in.

The writer computes it, the reader checks it, the node only carries it. 0 stands for "none was computed", so
a page whose digest happens to be 0 gets 1: one page in 2^64 then shares its checksum with another digest,
which costs nothing against the 2^-64 chance of any collision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

NO_CHECKSUM = 0


def checksum_page(segments: Sequence[Bytes1D]) -> int:
    """XXH3-64 of the segments' bytes one after the other, in [1, 2^64).

    `segments` are contiguous uint8 arrays; how a page is cut does not change its checksum. The GIL is
    released while a large segment is hashed.
    """
    if len(segments) == 1:
        return checksum_bytes(segments[0].data)
    digest = xxhash.xxh3_64()
    for segment in segments:
        digest.update(segment.data)
    return finish(digest)


def checksum_bytes(data: bytes | bytearray | memoryview) -> int:
    """The same of a page in one piece."""
    return int(xxhash.xxh3_64_intdigest(data)) or 1


def start() -> xxhash.xxh3_64:
    """A running checksum, for hashing each piece while it is still in the CPU's cache: `.update(piece)`."""
    return xxhash.xxh3_64()


def finish(digest: xxhash.xxh3_64) -> int:
    """The value of a running checksum, never 0."""
    return int(digest.intdigest()) or 1


# One page in the caller's memory: its segments in order, each a 1-D contiguous uint8 array. Written to on
# read.
Bytes1D: TypeAlias = npt.NDArray[np.uint8]


PageBuffers: TypeAlias = Sequence[Bytes1D]
