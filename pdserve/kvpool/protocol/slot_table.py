"""The slot table: one row per slot, in a file that is mapped beside the arena. Layout only. Pure.

The node is the only writer. There are two readers:

- The next incarnation of the node rebuilds everything from the table, in one vectorised scan.
- A client on the same host reads a row after copying a page. The slot must still hold the same filling
  (`sequence`). So a lease that ended during the copy gives a miss, never a wrong page.

Order of writes. On x86-64 other processes see the stores of one thread in program order; on other machines
the row's `guard` covers the difference.

    reserve    stores `state = RESERVED`, then `space`
    commit     writes all other fields and `state = FREE`, then `state = COMMITTED` last
    free       stores `state = FREE`

So a row that says COMMITTED is complete at every instant, or its guard is wrong: then recovery drops that
page alone. A reservation is answered after its row says RESERVED, so no client writes into a slot before.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

_FEW_ROWS = 8  # below, a row at a time is faster

Buffer: TypeAlias = memoryview | bytearray

TABLE_MAGIC = 0x3162_6154_5644_4B50  # "PKDVTab1", little-endian
TABLE_VERSION = 1


class SlotState(IntEnum):
    """The states of a slot. Rows of the table have the first three; the node alone knows the others."""

    FREE = 0
    RESERVED = 1
    COMMITTED = 2
    DOOMED = 3
    QUARANTINED = 4
    SWEEPING = 5


# The same as plain integers, for arrays and inner loops.
FREE, RESERVED, COMMITTED, DOOMED, QUARANTINED, SWEEPING = (state.value for state in SlotState)

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
        ("reserved", "<u8", (2,)),
    ]
)

# One row per slot: slot number = slab * (slab_bytes // min_slot_bytes) + position in the slab. 96 bytes.
ROW_DTYPE = np.dtype(
    [
        ("key", "<u8", (4,)),
        ("space", "<u8"),  # of the page's namespace; namespaces/catalog.py
        ("length_bytes", "<u8"),
        ("checksum", "<u8"),
        ("sequence", "<u8"),
        ("committed_s", "<f8"),  # CLOCK_MONOTONIC: as long-lived as the memory that holds the table
        ("guard", "<u8"),
        ("state", "<u8"),
        ("spare", "<u8"),
    ]
)

_SPACE_WORD = 4
_GUARDED_WORDS = 9  # of a row's 12: those before its guard
_GUARD_WORD = 9
_STATE_WORD = 10
_MASK = (1 << 64) - 1
_MIX_1, _MIX_2 = 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB  # of the SplitMix64 finaliser
_SALTS = tuple((place * 0x9E37_79B9_7F4A_7C15) & _MASK for place in range(1, _GUARDED_WORDS + 1))
_SALT_WORDS = np.array(_SALTS, dtype=np.uint64)[:, np.newaxis]

Words: TypeAlias = npt.NDArray[np.uint64]


def row_words(rows: npt.NDArray[np.void]) -> Words:
    """Rows of shape [n] as words of shape [n, 12]; the same memory."""
    return rows.view("<u8").reshape(len(rows), ROW_DTYPE.itemsize // 8)


def guards_of(words: Words) -> Words:
    """The guard of each row of `words`, shape [n, 9 or more]: a 64-bit mix of all fields of a committed row
    but its state. It detects torn and flipped rows.

    Not cryptographic. Each word is salted by its place and goes through the SplitMix64 finaliser, which is
    one to one. A change of one word always changes the sum; a change of several does so almost surely.
    """
    mixed = words[:, :_GUARDED_WORDS].T.copy()  # a column of all rows after the other: quicker to add up
    mixed += _SALT_WORDS
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(_MIX_1)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(_MIX_2)
    mixed ^= mixed >> np.uint64(31)
    guards: Words = mixed.sum(axis=0, dtype=np.uint64)
    return guards


def guard_of(words: Iterable[int]) -> int:
    """`guards_of` for one row of nine words. Faster than NumPy for few rows."""
    guard = 0
    for word, salt in zip(words, _SALTS, strict=True):
        mixed = (word + salt) & _MASK
        mixed = ((mixed ^ mixed >> 30) * _MIX_1) & _MASK
        mixed = ((mixed ^ mixed >> 27) * _MIX_2) & _MASK
        guard += mixed ^ mixed >> 31
    return guard & _MASK


@dataclass(frozen=True, slots=True)
class TableLayout:
    """Byte ranges in the file: header [0, 64), slab classes [64, rows_at), rows [rows_at, table_bytes)."""

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
        """The layout in the header of a table file of this length; None when the file is no table of ours."""
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
    """Writes rows into a mapped table, in the order given above."""

    _STATE = struct.Struct("<Q")
    _ROW = struct.Struct("<32sQQQQdQQ")  # as ROW_DTYPE, without what is spare
    _WORDS = struct.Struct("<9Q")

    def __init__(self, buffer: Buffer, layout: TableLayout) -> None:
        self._buffer = buffer
        self._rows_at = layout.rows_at
        self._words = row_words(layout.table_rows(buffer))

    def reserve(self, slots: list[int], space: int) -> None:
        """Mark rows RESERVED for pages of a space."""
        self._words[slots, _STATE_WORD] = RESERVED
        self._words[slots, _SPACE_WORD] = space

    def free(self, slots: list[int]) -> None:
        """Mark rows FREE."""
        self._words[slots, _STATE_WORD] = FREE

    def free_all_but(self, spaces: Collection[int]) -> None:
        """Mark all COMMITTED rows FREE but those of these spaces."""
        states = self._words[:, _STATE_WORD]
        foreign = ~np.isin(self._words[:, _SPACE_WORD], np.array(list(spaces), np.uint64))
        states[(states == COMMITTED) & foreign] = FREE

    def commit(
        self,
        slots: list[int],
        keys: list[bytes],
        spaces: list[int],
        lengths: list[int],
        checksums: list[int],
        sequences: list[int],
        committed_s: float,
    ) -> None:
        """Fill reserved rows, then mark them COMMITTED. The lists are columns of one length."""
        if len(slots) < _FEW_ROWS:
            for row in zip(slots, keys, spaces, lengths, checksums, sequences, strict=True):
                self._commit_one(committed_s, *row)
            return
        words = np.zeros((len(slots), ROW_DTYPE.itemsize // 8), dtype=np.uint64)
        words[:, :_SPACE_WORD] = np.frombuffer(b"".join(keys), "<u8").reshape(-1, _SPACE_WORD)
        words[:, _SPACE_WORD] = spaces
        words[:, 5] = lengths
        words[:, 6] = checksums
        words[:, 7] = sequences
        words[:, 8].view("<f8")[:] = committed_s
        words[:, _GUARD_WORD] = guards_of(words)
        self._words[slots] = words  # with the state FREE
        self._words[slots, _STATE_WORD] = COMMITTED

    def _commit_one(
        self,
        committed_s: float,
        slot: int,
        key: bytes,
        space: int,
        length_bytes: int,
        checksum: int,
        sequence: int,
    ) -> None:
        at = self._rows_at + slot * ROW_DTYPE.itemsize
        row = (key, space, length_bytes, checksum, sequence, committed_s)
        self._ROW.pack_into(self._buffer, at, *row, 0, FREE)
        guard = guard_of(self._WORDS.unpack_from(self._buffer, at))
        self._ROW.pack_into(self._buffer, at, *row, guard, FREE)
        self._STATE.pack_into(self._buffer, at + 8 * _STATE_WORD, COMMITTED)


class RowReader:
    """Reads rows of a table that another process writes."""

    _SEQUENCE_AND_STATE = struct.Struct("<Q16xQ")
    _SEQUENCE_AT = 8 * 7

    def __init__(self, buffer: Buffer, layout: TableLayout) -> None:
        self.buffer = buffer
        self.count = layout.rows
        self.rows_at = layout.rows_at
        self._at = layout.rows_at + self._SEQUENCE_AT

    def still_holds(self, slot: int, sequence: int) -> bool:
        """Whether the slot holds this filling, committed. To be asked after copying the page's bytes."""
        at = self._at + slot * ROW_DTYPE.itemsize
        found, state = self._SEQUENCE_AND_STATE.unpack_from(self.buffer, at)
        return bool(state == COMMITTED and found == sequence)

    def was_refilled(self, slot: int, sequence: int) -> bool:
        """Whether another page was committed in the slot since this filling."""
        at = self._at + slot * ROW_DTYPE.itemsize
        return bool(self._SEQUENCE_AND_STATE.unpack_from(self.buffer, at)[0] != sequence)


class Filling(NamedTuple):
    """One filling of a slot, and the rows that tell what becomes of it."""

    rows: RowReader
    slot: int
    sequence: int

    def holds(self) -> bool:
        """Whether all bytes of the slot that were read so far were this filling's."""
        return self.rows.still_holds(self.slot, self.sequence)

    def was_refilled(self) -> bool:
        """Whether another page was there since. Then right bytes in the slot now prove nothing: the same page
        may have come back after it.
        """
        return self.rows.was_refilled(self.slot, self.sequence)
