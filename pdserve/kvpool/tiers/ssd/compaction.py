"""Which segment makes room: pure.

Space is given back by whole segments. Three ways, the cheapest first:

    drop      nothing in it is found any more (its pages were forgotten, replaced or moved)
    compact   at most half of it is found: all of that moves to the newest segment, then it is dropped
    compact   the oldest: pages that were read since they were written move, as long as they are at most half
              of it, the others leave the tier, then it is dropped

So a page stays for as long as it is read once in the time that the whole tier is written once, and each
byte that is freed costs at most one byte that is written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec


class SegmentFacts(msgspec.Struct, frozen=True):
    """A sealed segment; `read_bytes` of the live ones. Bytes of records, headers included."""

    number: int
    total_bytes: int
    live_bytes: int
    read_bytes: int


class Drop(msgspec.Struct, frozen=True):
    """Remove the segment; what is live in it leaves the tier."""

    number: int


class Compact(msgspec.Struct, frozen=True):
    """Move live pages (`only_read`: of those, what was read), at most `budget_bytes` of them; then Drop."""

    number: int
    only_read: bool
    budget_bytes: int


Plan: TypeAlias = Drop | Compact


def make_room(segments: Sequence[SegmentFacts], room_bytes: int, wanted_bytes: int) -> Plan | None:
    """What to do next, oldest segment first in `segments`; None when there is room, or nothing to do."""
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
