"""Names of objects. Pure.

    pages/<namespace>/<number>-<nonce>.seg    a sealed segment; all of its pages are of one namespace

`namespace` is `SpaceFacts.shared`, 32 hexadecimal digits. Number and nonce are those of the segment's header,
16 hexadecimal digits each. A number is the time of the segment's beginning and some random bits, so names
sort by age, and nodes need not agree on numbers.

The records of a segment have a space that all nodes know: the first 16 digits of the namespace as a number.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from pdserve.kvpool.tiers.ssd.segment_format import BLOCK_BYTES, MAX_NUMBER, MAX_SEGMENT_BYTES

PREFIX: Final = "pages/"
NUMBER_RANDOM_BITS: Final = 20
MIN_SEGMENT_BYTES: Final = 5 * BLOCK_BYTES  # header, a record of two blocks, footer, trailer
_NAME: Final = re.compile(r"pages/([0-9a-f]{32})/([0-9a-f]{16})-([0-9a-f]{16})\.seg")


class SegmentObject(msgspec.Struct, frozen=True, gc=False):
    """A segment in the bucket, as a listing shows it."""

    namespace: str
    number: int
    nonce: int
    size_bytes: int

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.namespace}/{self.number:016x}-{self.nonce:016x}.seg"

    @property
    def space(self) -> int:
        """The space of its records."""
        return shared_space(self.namespace)


def parse_object(name: str, size_bytes: int) -> SegmentObject | None:
    """None: the object has not the name and size of a segment."""
    found = _NAME.fullmatch(name)
    if found is None or not MIN_SEGMENT_BYTES <= size_bytes <= MAX_SEGMENT_BYTES or size_bytes % BLOCK_BYTES:
        return None
    number = int(found[2], 16)
    if number >= MAX_NUMBER:
        return None
    return SegmentObject(found[1], number, int(found[3], 16), size_bytes)


def shared_space(namespace: str) -> int:
    """The space of a namespace's pages at all nodes."""
    return int(namespace[:16], 16)


def new_number(now_s: float, random: int, last: int) -> int:
    """A number for a segment that begins now, above `last`. `random`: NUMBER_RANDOM_BITS bits."""
    return max(int(now_s * 1000) << NUMBER_RANDOM_BITS | random, last + 1)
