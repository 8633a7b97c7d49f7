"""The records of one segment, wherever its bytes are. Pure.

Columns are indexed by ordinal: the position of a record in the segment.
"""

from __future__ import annotations

from array import array
from typing import Final

from msgspec.structs import replace

from pdserve.kvpool.tiers.ssd.segment_format import (
    BLOCK_BYTES,
    Bytes,
    Record,
    SegmentHeader,
    decode_record_header,
    record_blocks,
)

_LIVE, _READ = 1, 2
MAX_BATCH_PAGES: Final = 256  # per write; a page needs two buffers, and pwritev takes 1,024


class Segment:
    """`live`: the index refers to the record. `users`: number of readers, under the index's lock. A doomed
    segment is closed when its last reader ends.
    """

    def __init__(self, header: SegmentHeader) -> None:
        self.number = header.number
        self.nonce = header.nonce
        self.version = header.version
        self.file_bytes = 0
        self.end_block = 1  # block of the next record
        self.users = 0
        self.doomed = False
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
        record = decode_record_header(head, self.nonce, self.block(ordinal), self.version)
        if record is None or record.size_bytes != self.size(ordinal):
            return None
        if (record.page.key, record.page.length_bytes) != (self.keys[ordinal], self.length(ordinal)):
            return None
        space = self.space(ordinal)
        if self.version == 1:
            return replace(record, page=replace(record.page, space=space))
        return record if record.page.space == space else None

    def close(self) -> None:
        """The last reader has ended."""

    def __len__(self) -> int:
        return len(self.keys)

    def block(self, ordinal: int) -> int:
        """The first block of the record."""
        return self._blocks[ordinal]

    def space(self, ordinal: int) -> int:
        return self._spaces[ordinal]

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
