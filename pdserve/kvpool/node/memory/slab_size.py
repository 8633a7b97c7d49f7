"""Slabs that suit a size of pages. Pure.

A slab holds whole slots, and its remainder is never used: of a slab of 32 MiB with pages of 20 MiB that is
37 %. A larger slab has a smaller remainder, relative to its size. But it moves between sizes of pages as a
whole. So slabs grow no further than needed.
"""

from __future__ import annotations

from typing import Final

SLOT_ALIGN_BYTES: Final = 4096
MIN_SLOT_BYTES: Final = (
    16 << 10
)  # smaller pages take this much: a row of the slot table is for 96 bytes of it
SLAB_BYTES: Final = 32 << 20
SLABS: Final = 16
"""Least number of slabs, so that pages of several sizes find room in a small arena too."""
MAX_SLAB_BYTES: Final = 2 << 30  # no page is larger, and the index keeps a page's length in 32 bits
MAX_UNUSED: Final = 0.1
"""Most of a node's memory that pages of the size it was told should leave unused, as a share."""


def least_slab(capacity_bytes: int) -> int:
    """The size of slabs for pages of unknown sizes: a power of two, `SLAB_BYTES` at most."""
    part = max(MIN_SLOT_BYTES, capacity_bytes // SLABS)
    return min(SLAB_BYTES, 1 << part.bit_length() - 1)


def slab_for(page_bytes: int, *, capacity_bytes: int, unit_bytes: int = 1) -> int:
    """The smallest multiple of `least_slab` in which pages of this size leave `MAX_UNUSED` of the capacity
    unused at most; else the one where they leave least. The whole slabs are a multiple of `unit_bytes`, where
    that is possible. `page_bytes` 0: unknown.
    """
    least = least_slab(capacity_bytes)
    if not page_bytes:
        return least
    slot_bytes = max(MIN_SLOT_BYTES, -(-page_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES)
    best, best_used = least, 0
    for slab in range(least, min(capacity_bytes, MAX_SLAB_BYTES) + 1, least):
        slabs = capacity_bytes // slab
        used = slabs * (slab // slot_bytes) * slot_bytes
        if used > best_used and slabs * slab % unit_bytes == 0:
            best, best_used = slab, used
            if used >= (1 - MAX_UNUSED) * capacity_bytes:
                break
    return best


def wastes(slab_bytes: int, slot_bytes: int) -> bool:
    """Whether slots of this size leave more than `MAX_UNUSED` of a slab unused."""
    return slab_bytes % slot_bytes > MAX_UNUSED * slab_bytes
