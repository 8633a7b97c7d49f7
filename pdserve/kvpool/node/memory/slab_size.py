"""Slabs that suit a size of pages. Pure.

A slab holds whole slots, and its remainder is never used: of a slab of 32 MiB with pages of 20 MiB that is
37 %. A larger slab has a smaller remainder, relative to its size. But it moves between sizes of pages as a
whole. So slabs grow no further than needed.
"""

from __future__ import annotations

from typing import Final

SLOT_ALIGN_BYTES: Final = 4096
MAX_SLAB_BYTES: Final = 2 << 30  # no page is larger, and the index keeps a page's length in 32 bits
MAX_UNUSED: Final = 0.1
"""Most of a node's memory that pages of the size it was told should leave unused, as a share."""


def slab_for(
    page_bytes: int, *, capacity_bytes: int, least_bytes: int, min_slot_bytes: int, unit_bytes: int = 1
) -> int:
    """The smallest multiple of `least_bytes` in which pages of this size leave `MAX_UNUSED` of the capacity
    unused at most; else the one where they leave least. The whole slabs are a multiple of `unit_bytes`, where
    that is possible.
    """
    slot_bytes = max(min_slot_bytes, -(-page_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES)
    best, best_used = least_bytes, 0
    for slab in range(least_bytes, min(capacity_bytes, MAX_SLAB_BYTES) + 1, least_bytes):
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
