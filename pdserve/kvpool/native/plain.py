"""What `copier.c` does, with NumPy and xxhash: page by page, the interpreter lock for each piece.

The order is the same: every bound is checked before the first byte moves, and a row is read after its page.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from pdserve.kvpool.protocol.page_bytes import NO_CHECKSUM, Bytes1D, PageBuffers, finish, start
from pdserve.kvpool.protocol.slot_table import COMMITTED, ROW_DTYPE, Buffer

PIECE_BYTES: Final = 256 * 1024  # is hashed while it is in the CPU's cache
OK, LOST, CORRUPT = 0, 1, 2


def read(
    arena: Bytes1D,
    table: Buffer,
    rows_at: int,
    offsets: list[int],
    checksums: list[int],
    slots: list[int],
    sequences: list[int],
    pages: Sequence[PageBuffers],
    checksum: bool,
    deadline_s: float,
    /,
) -> list[int]:
    """See `copying.read`."""
    rows = np.frombuffer(table, ROW_DTYPE, (len(table) - rows_at) // ROW_DTYPE.itemsize, rows_at)
    _check_bounds(arena, offsets, pages)
    if any(not 0 <= slot < len(rows) for slot in slots):
        raise IndexError("a slot is outside of the table")
    outcomes = []
    columns = zip(offsets, checksums, slots, sequences, pages, strict=True)
    for offset, expected, slot, sequence, page in columns:
        found = _move(arena, offset, page, checksum and expected != NO_CHECKSUM, deadline_s, is_read=True)
        row = rows[slot]
        if int(row["state"]) != COMMITTED or int(row["sequence"]) != sequence:
            outcomes.append(LOST)
        else:
            outcomes.append(OK if found in (expected, NO_CHECKSUM) else CORRUPT)
    return outcomes


def write(
    arena: Bytes1D,
    offsets: list[int],
    pages: Sequence[PageBuffers],
    checksum: bool,
    deadline_s: float,
    /,
) -> list[int]:
    """See `copying.write`."""
    _check_bounds(arena, offsets, pages)
    return [
        _move(arena, offset, page, checksum, deadline_s, is_read=False)
        for offset, page in zip(offsets, pages, strict=True)
    ]


def _check_bounds(arena: Bytes1D, offsets: list[int], pages: Sequence[PageBuffers]) -> None:
    for offset, page in zip(offsets, pages, strict=True):
        if not 0 <= offset <= arena.size - sum(segment.size for segment in page):
            raise IndexError("a page is outside of the memory")


def _move(
    arena: Bytes1D, offset: int, page: PageBuffers, hashes: bool, deadline_s: float, *, is_read: bool
) -> int:
    """Copy a page. Returns the checksum of what was copied, NO_CHECKSUM if none was wanted."""
    if time.monotonic() >= deadline_s:
        raise TimeoutError("the deadline passed while pages were copied")
    digest = start()
    for piece in _pieces(page):
        slot = arena[offset : offset + piece.size]
        target, source = (piece, slot) if is_read else (slot, piece)
        np.copyto(target, source)
        if hashes:
            digest.update(piece.data)
        offset += piece.size
    return finish(digest) if hashes else NO_CHECKSUM


def _pieces(page: PageBuffers) -> Iterator[Bytes1D]:
    for segment in page:
        for at in range(0, segment.size, PIECE_BYTES):
            yield segment[at : at + PIECE_BYTES]
