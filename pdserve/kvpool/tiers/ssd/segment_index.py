"""The records of a segment, wherever its bytes are, and the index of a tier: the place of each page. No I/O.

A record's columns are indexed by its ordinal, which is its position in the segment. A place is a segment's
number and an ordinal, packed into one integer. One lock protects the index; no thread holds it during I/O.

**Compaction** is the choice of the segment that makes room. A page is *live* while the index refers to its
record. Space is freed by dropping whole segments. There are three ways, the cheapest first:

    drop      a segment without live pages (they were forgotten, replaced or moved)
    compact   a segment of which at most half is live: its live pages move to the newest segment, then drop
    compact   the oldest segment: live pages that were read since their write move, at most half of it; its
              other pages leave the tier, then drop

So a page stays if it is read once in the time in which the whole tier is rewritten. Each freed byte costs at
most one written byte.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Collection, Sequence
from typing import Final, Generic, TypeAlias, TypeVar

import msgspec
import numpy as np

from pdserve.kvpool.tiers.base import PageName
from pdserve.kvpool.tiers.ssd.segment_format import (
    BLOCK_BYTES,
    Bytes,
    Record,
    SegmentHeader,
    decode_record_header,
    record_blocks,
)

MAX_BATCH_PAGES: Final = 256  # per write; a page needs two buffers, and pwritev takes 1,024
_LIVE, _READ = 1, 2
_ORDINAL_BITS: Final = 32
_ORDINAL_MASK: Final = (1 << _ORDINAL_BITS) - 1
_AT_A_TIME: Final = 4096  # pages forgotten in one critical section


class Segment:
    """`live`: the index refers to the record. `pins`: number of readers, under the index's lock. A removed
    segment is closed when its last reader ends.
    """

    def __init__(self, header: SegmentHeader) -> None:
        self.number = header.number
        self.nonce = header.nonce
        self.file_bytes = 0
        self.pins = 0
        self.removed = False
        self.reset()

    def reset(self) -> None:
        """It has no records."""
        self.end_block = 1  # block of the next record
        self.keys: list[bytes] = []
        self.live_bytes = 0
        self.read_bytes = 0
        self._blocks = array("I")
        self._spaces = array("Q")
        self._lengths = array("I")
        self._stored = array("I")  # bytes; 0: the page is stored as it is
        self._flags = bytearray()

    def add(self, record: Record) -> None:
        """The next record. It is not live yet."""
        page = record.page
        self.keys.append(page.key)
        self._blocks.append(record.block)
        self._spaces.append(page.space)
        self._lengths.append(page.length_bytes)
        self._stored.append(record.stored_bytes)
        self._flags.append(0)
        self.end_block = max(self.end_block, record.end_block)

    def take_over(self, other: Segment) -> None:
        """Become the segment that has these records, with what is live."""
        self.keys, self._blocks, self._spaces = other.keys, other._blocks, other._spaces
        self._lengths, self._stored, self._flags = other._lengths, other._stored, other._flags
        self.end_block, self.live_bytes, self.read_bytes = other.end_block, other.live_bytes, other.read_bytes

    def record_in(self, head: Bytes, ordinal: int) -> Record | None:
        """The record of this header block, or None if it is not the one at `ordinal`."""
        record = decode_record_header(head, self.nonce, self.block(ordinal))
        if record is None or record.size_bytes != self.size(ordinal):
            return None
        if (record.page.key, record.page.length_bytes) != (self.keys[ordinal], self.length(ordinal)):
            return None
        return record if record.page.space == self.space(ordinal) else None

    def records_of(self, space: int, keys: Collection[bytes] | None) -> list[int]:
        """The ordinals of the space's records, dead ones too; of these keys, or (None) of all."""
        found = np.flatnonzero(np.frombuffer(self._spaces, np.uint64) == space).tolist()
        return [ordinal for ordinal in found if keys is None or self.keys[ordinal] in keys]

    def close(self) -> None:
        """The last reader has ended."""

    def __len__(self) -> int:
        return len(self.keys)

    def block(self, ordinal: int) -> int:
        """The first block of the record."""
        return self._blocks[ordinal]

    def space(self, ordinal: int) -> int:
        return self._spaces[ordinal]

    def spaces(self) -> Sequence[int]:
        """Of all records."""
        return self._spaces

    def length(self, ordinal: int) -> int:
        """Bytes of the page."""
        return self._lengths[ordinal]

    def size(self, ordinal: int) -> int:
        """Stored bytes of the page."""
        return self._stored[ordinal] or self._lengths[ordinal]

    def as_it_is(self, ordinal: int) -> bool:
        """Whether the page is stored as it is in memory."""
        return not self._stored[ordinal]

    def record_bytes(self, ordinal: int) -> int:
        """Bytes of the whole record, in blocks."""
        return record_blocks(self.size(ordinal)) * BLOCK_BYTES

    def set_live(self, ordinal: int) -> None:
        assert not self._flags[ordinal] & _LIVE
        self._flags[ordinal] |= _LIVE
        self.live_bytes += self.record_bytes(ordinal)

    def set_dead(self, ordinal: int) -> None:
        flags = self._flags[ordinal]
        assert flags & _LIVE
        size = self.record_bytes(ordinal)
        self.live_bytes -= size
        self.read_bytes -= size if flags & _READ else 0
        self._flags[ordinal] = 0

    def set_read(self, ordinal: int) -> None:
        if self._flags[ordinal] == _LIVE:
            self._flags[ordinal] |= _READ
            self.read_bytes += self.record_bytes(ordinal)

    def is_live(self, ordinal: int) -> bool:
        return bool(self._flags[ordinal] & _LIVE)

    def was_read(self, ordinal: int) -> bool:
        return bool(self._flags[ordinal] & _READ)


AnySegment = TypeVar("AnySegment", bound=Segment)


class SegmentIndex(Generic[AnySegment]):
    """Thread-safe. In the SSD tier the writer's thread alone adds and removes segments."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[int, dict[bytes, int]] = {}  # space -> key -> place
        self.segments: dict[int, AnySegment] = {}  # by number, ascending

    def add_segment(self, segment: AnySegment) -> bool:
        """False: there is a segment of this number."""
        with self._lock:
            return self.segments.setdefault(segment.number, segment) is segment

    def insert(self, segment: AnySegment, ordinals: Sequence[int], *, newest: bool = False) -> list[int]:
        """Make these records the live ones of their pages. Returns those that became so.

        `newest`: leave out records of pages that have a newer one. A segment that was removed gets none.
        """
        inserted: list[int] = []
        with self._lock:
            if self.segments.get(segment.number) is not segment:
                return inserted
            for ordinal in ordinals:
                space, key = segment.space(ordinal), segment.keys[ordinal]
                place = segment.number << _ORDINAL_BITS | ordinal
                if newest and self._places.get(space, {}).get(key, -1) > place:
                    continue
                self._delete(space, key)
                self._places.setdefault(space, {})[key] = place
                segment.set_live(ordinal)
                inserted.append(ordinal)
        return inserted

    def replace(self, segment: AnySegment, by: AnySegment) -> bool:
        """Put another segment with the same records in the place of one. False: it was removed."""
        with self._lock:
            if self.segments.get(segment.number) is not segment:
                return False
            by.take_over(segment)
            self.segments[segment.number] = by
            self._close(segment)
        return True

    def holds(self, name: PageName) -> bool:
        """Whether there is a record of this page, of this length."""
        with self._lock:
            place = self._places.get(name.space, {}).get(name.key)
            if place is None:
                return False
            length = self.segments[place >> _ORDINAL_BITS].length(place & _ORDINAL_MASK)
        return length == name.length_bytes

    def pin(self, names: Sequence[PageName]) -> list[tuple[int, int, int, AnySegment]]:
        """Find pages: (segment's number, ordinal, position in `names`, segment), in the order of the device.
        The caller must call `unpin` for each result.
        """
        found = []
        with self._lock:
            for at, name in enumerate(names):
                place = self._places.get(name.space, {}).get(name.key)
                if place is None:
                    continue
                segment, ordinal = self.segments[place >> _ORDINAL_BITS], place & _ORDINAL_MASK
                if segment.length(ordinal) == name.length_bytes:
                    segment.pins += 1
                    found.append((segment.number, ordinal, at, segment))
        found.sort(key=lambda entry: entry[:2])
        return found

    def unpin(self, segment: AnySegment, ordinal: int, *, was_read: bool) -> None:
        """Undo `pin`."""
        with self._lock:
            current = self.segments.get(segment.number)  # another object after `replace`
            if was_read and current is not None:
                current.set_read(ordinal)
            self._release(segment)

    def forget(self, names: Sequence[PageName]) -> None:
        with self._lock:
            for name in names:
                self._delete(name.space, name.key)

    def forget_keys(self, space: int, keys: Collection[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._delete(space, key)

    def forget_space(self, space: int) -> None:
        with self._lock:
            keys = list(self._places.get(space, ()))
        for first in range(0, len(keys), _AT_A_TIME):
            with self._lock:
                for key in keys[first : first + _AT_A_TIME]:
                    self._delete(space, key)
        with self._lock:
            for key in list(self._places.get(space, ())):  # inserted meanwhile by another thread
                self._delete(space, key)
            self._places.pop(space, None)

    def live(self, segment: AnySegment) -> list[PageName]:
        """The names of the live pages in this segment."""
        with self._lock:
            return [
                PageName(segment.space(ordinal), segment.keys[ordinal], segment.length(ordinal))
                for ordinal in range(len(segment))
                if segment.is_live(ordinal)
            ]

    def choose(
        self, segment: AnySegment, ordinal: int, budget_bytes: int, step_bytes: int, *, only_read: bool
    ) -> tuple[list[int], int, int]:
        """Choose live records to move, from `ordinal` on: (ordinals, next ordinal, bytes).

        A single page may exceed `step_bytes`, but no page exceeds `budget_bytes`.
        """
        chosen: list[int] = []
        size = 0
        with self._lock:
            while ordinal < len(segment) and len(chosen) < MAX_BATCH_PAGES:
                if segment.was_read(ordinal) if only_read else segment.is_live(ordinal):
                    more = segment.record_bytes(ordinal)
                    if size + more > budget_bytes or (chosen and size + more > step_bytes):
                        break
                    chosen.append(ordinal)
                    size += more
                ordinal += 1
        return chosen, ordinal, size

    def facts(self, but: AnySegment | None) -> list[SegmentFacts]:
        """The facts of all segments except `but`, oldest first."""
        with self._lock:
            return [
                SegmentFacts(segment.number, segment.file_bytes, segment.live_bytes, segment.read_bytes)
                for segment in self.segments.values()
                if segment is not but
            ]

    def remove(self, segment: AnySegment) -> None:
        """Remove the segment and its records. Its file is closed when the last reader ends."""
        with self._lock:
            assert not segment.live_bytes
            del self.segments[segment.number]
            self._close(segment)

    def discard(self, number: int) -> list[PageName]:
        """Remove a segment and its records, if it is there. Returns the names of pages that were live."""
        with self._lock:
            segment = self.segments.pop(number, None)
            if segment is None:
                return []
            live = [ordinal for ordinal in range(len(segment)) if segment.is_live(ordinal)]
            names = [
                PageName(segment.space(ordinal), segment.keys[ordinal], segment.length(ordinal))
                for ordinal in live
            ]
            for name in names:
                del self._places[name.space][name.key]
            for ordinal in live:
                segment.set_dead(ordinal)
            self._close(segment)
        return names

    def close(self) -> None:
        with self._lock:
            self._places.clear()
            for segment in self.segments.values():
                self._close(segment)
            self.segments.clear()

    def _delete(self, space: int, key: bytes) -> None:
        place = self._places.get(space, {}).pop(key, None)
        if place is not None:
            self.segments[place >> _ORDINAL_BITS].set_dead(place & _ORDINAL_MASK)

    def _close(self, segment: AnySegment) -> None:
        segment.removed = True
        segment.pins += 1
        self._release(segment)

    def _release(self, segment: AnySegment) -> None:
        segment.pins -= 1
        if segment.removed and not segment.pins:
            segment.close()


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
