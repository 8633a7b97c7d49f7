"""A segment in the bucket: its index is loaded once, its pages are read by range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from pdserve.kvpool.tiers.base import PageMemory, padded
from pdserve.kvpool.tiers.object.bucket import Bucket
from pdserve.kvpool.tiers.object.inventory import SegmentObject
from pdserve.kvpool.tiers.page_codec import StoredPage
from pdserve.kvpool.tiers.ssd.segment_format import BLOCK_BYTES, SegmentHeader, read_sealed, record_blocks
from pdserve.kvpool.tiers.ssd.segment_index import Segment

TAIL_BYTES: Final = 256 << 10  # read for the index: footers of up to 3,500 records
RUN_BYTES: Final = 8 << 20  # most bytes of one request, but at least one page
GAP_BYTES: Final = 64 << 10  # bytes between two pages that are rather read than asked for apart


class RemoteSegment(Segment):
    """A segment in the bucket. `absent`: the store said that it is gone."""

    def __init__(self, one: SegmentObject, header: SegmentHeader) -> None:
        super().__init__(header)
        self.object = one
        self.file_bytes = one.size_bytes
        self.absent = False


def load_segment(bucket: Bucket, one: SegmentObject) -> RemoteSegment | None:
    """The segment with its records. None: the object is not what its name says. Raises StoreError.

    An object is hostile input: header, trailer and footer have guards that accidents do not pass, their
    numbers are checked, and each page is checked again when it is read.
    """
    tail_bytes = min(one.size_bytes, TAIL_BYTES)
    tail_at = one.size_bytes - tail_bytes
    tail = bucket.read(one.name, tail_at, tail_bytes)

    def read(offset: int, size: int) -> memoryview:
        if offset < tail_at:
            return bucket.read(one.name, offset, size)
        return tail[offset - tail_at : offset - tail_at + size]

    found = read_sealed(read, one.size_bytes)
    if found is None or (found.header.number, found.header.nonce) != (one.number, one.nonce):
        return None
    if any(record.page.space != one.space for record in found.records):
        return None
    segment = RemoteSegment(one, found.header)
    for record in found.records:
        segment.add(record)
    return segment


def read_pages(
    bucket: Bucket, segment: RemoteSegment, ordinals: Sequence[int], into: Sequence[PageMemory]
) -> Iterator[tuple[int, StoredPage | None]]:
    """(position in `ordinals`, stored page) for each; None: these bytes are not the page's. Pages that are
    stored as they are come into `into`. `ordinals` ascend. Raises StoreError.
    """
    first = 0
    while first < len(ordinals):
        start = segment.block(ordinals[first]) * BLOCK_BYTES
        end, next_run = start, first
        while next_run < len(ordinals):
            ordinal = ordinals[next_run]
            at = segment.block(ordinal) * BLOCK_BYTES
            until = at + record_blocks(segment.size(ordinal)) * BLOCK_BYTES
            if next_run > first and (at - end > GAP_BYTES or until - start > RUN_BYTES):
                break
            end, next_run = until, next_run + 1
        content = bucket.read(segment.object.name, start, end - start)
        for place in range(first, next_run):
            at = segment.block(ordinals[place]) * BLOCK_BYTES - start
            yield place, _stored(segment, ordinals[place], content[at:], into[place])
        first = next_run


def _stored(segment: RemoteSegment, ordinal: int, content: memoryview, into: PageMemory) -> StoredPage | None:
    record = segment.record_in(content[:BLOCK_BYTES], ordinal)
    length, size = segment.length(ordinal), segment.size(ordinal)
    if record is None or padded(length) > len(into):
        return None
    data = np.frombuffer(content[BLOCK_BYTES : BLOCK_BYTES + size], np.uint8)
    if segment.as_it_is(ordinal):
        into[:size] = data
        data = into
    return record.stored(data)
