"""The choice of the segment that makes room. Pure.

A page is *live* while the index refers to its record. Space is freed by dropping whole segments. There are
three ways, the cheapest first:

    drop      a segment without live pages (they were forgotten, replaced or moved)
    compact   a segment of which at most half is live: its live pages move to the newest segment, then drop
    compact   the oldest segment: live pages that were read since their write move, at most half of it; its
              other pages leave the tier, then drop

So a page stays if it is read once in the time in which the whole tier is rewritten. Each freed byte costs at
most one written byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec


class SegmentFacts(msgspec.Struct, frozen=True):
    """The sizes of a sealed segment, in bytes of records including headers.

    `read_bytes`: the part of `live_bytes` that was read since its write.
    """

    number: int
    total_bytes: int
    live_bytes: int
    read_bytes: int


class Drop(msgspec.Struct, frozen=True):
    """Remove the segment. Its live pages leave the tier."""

    number: int


class Compact(msgspec.Struct, frozen=True):
    """Move live pages (`only_read`: only those that were read), at most `budget_bytes`; then drop."""

    number: int
    only_read: bool
    budget_bytes: int


Plan: TypeAlias = Drop | Compact


def make_room(segments: Sequence[SegmentFacts], room_bytes: int, wanted_bytes: int) -> Plan | None:
    """The next step. `segments`: oldest first. None: there is room, or no segment."""
    empty = [segment for segment in segments if not segment.live_bytes]
    if empty:
        return Drop(empty[0].number)
    if room_bytes >= wanted_bytes or not segments:
        return None
    emptiest = min(segments, key=lambda segment: segment.live_bytes / segment.total_bytes)
    if emptiest.live_bytes <= emptiest.total_bytes // 2:
        return Compact(emptiest.number, only_read=False, budget_bytes=emptiest.total_bytes // 2)
    oldest = segments[0]
    if oldest.read_bytes:
        return Compact(oldest.number, only_read=True, budget_bytes=oldest.total_bytes // 2)
    return Drop(oldest.number)
