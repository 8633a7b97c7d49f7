"""Segments that no tier wrote."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import xxhash

from pdserve.kvpool.tiers.base import TierPage
from pdserve.kvpool.tiers.ssd.segment_format import (
    BLOCK_BYTES,
    ENTRY_DTYPE,
    FORMAT_VERSION,
    Record,
    encode_footer,
)
from tests.support.kvpool.tier_tools import key


def footers() -> Iterator[tuple[str, bytes]]:
    """Footers with right guards that say what cannot be. Each in a segment with room for eight blocks."""
    ours, theirs = TierPage(1, key(0), 4096, 0, 1), TierPage(1, key(1), 4096, 0, 2)
    cases = {
        "two records in one place": [Record(1, ours), Record(1, theirs)],
        "two records that overlap": [Record(1, TierPage(1, key(0), 8192, 0, 1)), Record(2, theirs)],
        "a record in the header": [Record(0, ours)],
        "a record of no bytes": [Record(1, TierPage(1, key(0), 0, 0, 1))],
        "a record beyond the end": [Record(8, TierPage(1, key(0), 1 << 30, 0, 1))],
        "a record behind one of later blocks": [Record(5, ours), Record(1, theirs)],
        "more records than fit": [Record(1 + 2 * n, ours) for n in range(9)],
    }
    for what, records in cases.items():
        yield what, encode_footer(records, 9, 1)
    body = np.zeros(1, ENTRY_DTYPE)
    body["length_bytes"] = (1 << 64) - 1
    body["block"] = 1
    text = body.tobytes() + bytes(BLOCK_BYTES - body.nbytes)
    trailer = struct.pack(
        "<QQQQQQ",
        int.from_bytes(b"PDVEnd01", "little"),
        FORMAT_VERSION,
        1,
        1,
        9,
        xxhash.xxh3_64_intdigest(text),
    )
    guard = struct.pack("<Q", xxhash.xxh3_64_intdigest(trailer))
    yield "a length that overflows", text + (trailer + guard).ljust(BLOCK_BYTES, b"\0")
