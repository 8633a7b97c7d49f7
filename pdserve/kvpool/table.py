"""The slot table: one row per slot, in a file mapped beside the arena. Layout only; pure.

The node is its only writer. It serves two readers: the node's own next incarnation, which rebuilds everything
from it in one vectorised scan, and same-host clients, which check after copying a page that the slot still
holds the same filling (`sequence`), so that a lease that ended during the copy is a miss and never a wrong
page.

Write order (stores of one thread become visible in program order on x86-64; on other machines the row's
`guard` covers the difference): a commit writes every other field, then `guard`, then `state = COMMITTED`
last; freeing writes `state = FREE` first; filling anew the slot of an evicted page overwrites its row from
start to end, `state = FREE` among it, and then writes `state = RESERVED`. So whatever instant the node dies
at, a row that says COMMITTED is whole, or its guard is wrong and recovery drops that page alone. Nobody
writes into a slot before the row that reserves it is complete: only then is the reservation answered.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Buffer: TypeAlias = memoryview | bytearray

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


_MIX_1, _MASK = 0xBF58_476D_1CE4_E5B9, (1 << 64) - 1
_KEY_WORDS = struct.Struct("<4Q")


def guard_of(key: bytes, namespace: int, length_bytes: int, checksum: int, sequence: int) -> int:
    """`row_guard` of one row, faster than NumPy for few."""
    guard = int(_MIX)
    for word in (*_KEY_WORDS.unpack(key), namespace, length_bytes, checksum, sequence):
        guard = ((guard ^ word) * _MIX_1) & _MASK
        guard ^= guard >> 29
    return guard


@dataclass(frozen=True, slots=True)
class TableLayout:
    """Where everything lies in a table file: header, slab classes, rows, as half-open byte ranges
    [0, 64) [64, rows_at) [rows_at, table_bytes).
    """

    arena_bytes: int
    slab_bytes: int
    min_slot_bytes: int

    @property
    def slabs(self) -> int:
        return self.arena_bytes // self.slab_bytes

    @property
    def slots_per_slab(self) -> int:
        return self.slab_bytes // self.min_slot_bytes

    @property
    def rows(self) -> int:
        return self.slabs * self.slots_per_slab

    @property
    def rows_at(self) -> int:
        return HEADER_DTYPE.itemsize + 8 * self.slabs

    @property
    def table_bytes(self) -> int:
        return self.rows_at + ROW_DTYPE.itemsize * self.rows

    def header(self, buffer: Buffer) -> npt.NDArray[np.void]:
        """The header in a mapped table, shape [1]."""
        return np.frombuffer(buffer, HEADER_DTYPE, 1)

    def slab_class(self, buffer: Buffer) -> npt.NDArray[np.uint64]:
        """Slot size by slab in a mapped table, shape [slabs]."""
        return np.frombuffer(buffer, np.dtype("<u8"), self.slabs, HEADER_DTYPE.itemsize)

    def table_rows(self, buffer: Buffer) -> npt.NDArray[np.void]:
        """The rows in a mapped table, shape [rows]."""
        return np.frombuffer(buffer, ROW_DTYPE, self.rows, self.rows_at)

    @classmethod
    def from_header(cls, header_bytes: bytes, file_bytes: int) -> TableLayout | None:
        """The layout that a table file of this length claims in its header; None when it is none of ours."""
        if len(header_bytes) < HEADER_DTYPE.itemsize:
            return None
        header = np.frombuffer(header_bytes, HEADER_DTYPE, 1)[0]
        if int(header["magic"]) != TABLE_MAGIC or int(header["version"]) != TABLE_VERSION:
            return None
        layout = cls(int(header["arena_bytes"]), int(header["slab_bytes"]), int(header["min_slot_bytes"]))
        if not 0 < layout.min_slot_bytes <= layout.slab_bytes <= layout.arena_bytes:
            return None
        return layout if file_bytes == layout.table_bytes else None


class RowWriter:
    """Writes rows into a mapped table, in the order that the module's theory asks for."""

    _ROW = struct.Struct("<32sIIQQQQ")  # key, namespace, state, length, checksum, sequence, guard
    _STATE = struct.Struct("<I")
    _STATE_AT = 36

    def __init__(self, buffer: Buffer, layout: TableLayout) -> None:
        self._buffer = buffer
        self._rows_at = layout.rows_at

    def write(
        self,
        slot: int,
        state: int,
        key: bytes,
        namespace: int,
        length_bytes: int,
        checksum: int,
        sequence: int,
    ) -> None:
        at = self._rows_at + slot * ROW_DTYPE.itemsize
        guard = guard_of(key, namespace, length_bytes, checksum, sequence) if state == COMMITTED else 0
        # FREE in between also when a reservation is committed: its writer has finished
        self._ROW.pack_into(self._buffer, at, key, namespace, FREE, length_bytes, checksum, sequence, guard)
        self._STATE.pack_into(self._buffer, at + self._STATE_AT, state)

    def free(self, slot: int) -> None:
        at = self._rows_at + slot * ROW_DTYPE.itemsize + self._STATE_AT
        self._STATE.pack_into(self._buffer, at, FREE)


class RowReader:
    """Reads rows of a table that another process writes."""

    _STATE_AND_SEQUENCE = struct.Struct("<I16xQ")

    def __init__(self, buffer: Buffer, layout: TableLayout) -> None:
        self._buffer = buffer
        self._at = layout.rows_at + RowWriter._STATE_AT

    def still_holds(self, slot: int, sequence: int) -> bool:
        """Whether the slot holds this very filling, committed. Asked after copying the page's bytes."""
        at = self._at + slot * ROW_DTYPE.itemsize
        state, found = self._STATE_AND_SEQUENCE.unpack_from(self._buffer, at)
        return bool(state == COMMITTED and found == sequence)
