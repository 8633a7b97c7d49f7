"""The slot table: one row per slot, in a file mapped beside the arena. Layout only; pure.

The node is its only writer. It serves two readers: the node's own next incarnation, which rebuilds everything
from it in one vectorised scan, and same-host clients, which check after copying a page that the slot still
holds the same filling (`sequence`), so that a lease that ended during the copy is a miss and never a wrong
page.

Write order (stores of one thread become visible in program order on x86-64; on other machines the row's
`guard` covers the difference): a commit writes every other field, then `guard`, then `state = COMMITTED`
last; freeing writes `state = FREE` first. So whatever instant the node dies at, a row that says COMMITTED is
whole, or its guard is wrong and recovery drops that page alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

TABLE_MAGIC = 0x3162_6154_5644_4B50  # "PKDVTab1", little-endian
TABLE_VERSION = 1

FREE = 0
RESERVED = 1
COMMITTED = 2

# One header, at the start of the table file. `slab_class[i]` follows it: slot size of slab i in bytes, 0 when
# unassigned.
HEADER_DTYPE = np.dtype(
    [
        ("magic", "<u8"),
        ("version", "<u8"),
        ("arena_bytes", "<u8"),
        ("slab_bytes", "<u8"),
        ("min_slot_bytes", "<u8"),
        ("incarnation", "<u8"),
        ("next_sequence", "<u8"),  # a lower bound: every sequence in the table is also considered at recovery
        ("reserved", "<u8"),
    ]
)

# One row per slot: slot number = slab * (slab_bytes // min_slot_bytes) + position in the slab. 96 bytes.
ROW_DTYPE = np.dtype(
    [
        ("key", "<u8", (4,)),
        ("namespace", "<u4"),
        ("state", "<u4"),
        ("length_bytes", "<u8"),
        ("checksum", "<u8"),
        ("sequence", "<u8"),
        ("guard", "<u8"),
        ("spare", "<u8", (3,)),
    ]
)

_MIX = np.uint64(0x9E37_79B9_7F4A_7C15)


def row_guard(rows: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    """A 64-bit mix of everything a committed row says, for rows of shape [n]; detects torn and flipped rows.

    Not cryptographic: multiply-xor-shift (the SplitMix64 finaliser's constants) over the row's words,
    vectorised, so that a million rows take milliseconds.
    """
    words = (
        rows["key"][:, 0],
        rows["key"][:, 1],
        rows["key"][:, 2],
        rows["key"][:, 3],
        rows["namespace"].astype(np.uint64),
        rows["length_bytes"],
        rows["checksum"],
        rows["sequence"],
    )
    guard = np.full(len(rows), _MIX, dtype=np.uint64)
    for word in words:
        guard ^= word
        guard *= np.uint64(0xBF58_476D_1CE4_E5B9)
        guard ^= guard >> np.uint64(29)
    return guard
