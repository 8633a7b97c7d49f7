"""Copies of pages by the compiled copier, or by NumPy where it was not built or cannot hash a page."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Final

from pdserve.kvpool.native import plain
from pdserve.kvpool.native.build import compiled
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers
from pdserve.kvpool.protocol.slot_table import Buffer

LEAST_HASHED_BYTES: Final = 241  # of a page: XXH3 has another rule for shorter inputs


def read(
    arena: Bytes1D,
    table: Buffer,
    rows_at: int,
    offsets: list[int],
    checksums: list[int],
    slots: list[int],
    sequences: list[int],
    pages: Sequence[PageBuffers],
    *,
    checksum: bool,
    deadline_s: float,
) -> list[int]:
    """Copy pages from the arena into the caller's buffers. Returns for each 0: it is right; 1: its slot was
    refilled, as its row says after the copy; 2: its bytes have another checksum. The interpreter lock is
    released once, and nothing writes into the buffers after the return or an error.

    `arena`: uint8, shape [arena bytes]. `table`: the slot table, whose rows begin at `rows_at`. `offsets`,
    `checksums` (0: unknown), `slots`, `sequences`: one for each page. `pages`: contiguous uint8 segments,
    writable. `deadline_s`: a time of time.monotonic().

    Raises IndexError: a page or row is outside of the memory, and nothing was copied. OverflowError: a number
    is negative or longer than 64 bits, and nothing was copied. TimeoutError: the deadline passed.
    """
    outcomes: list[int] = _copier_for(pages, checksum).read(
        arena, table, rows_at, offsets, checksums, slots, sequences, pages, checksum, deadline_s
    )
    return outcomes


def write(
    arena: Bytes1D, offsets: list[int], pages: Sequence[PageBuffers], *, checksum: bool, deadline_s: float
) -> list[int]:
    """Copy pages from the caller's buffers into the arena. Returns their checksums, zeros without `checksum`.

    Arguments and errors as of `read`.
    """
    checksums: list[int] = _copier_for(pages, checksum).write(arena, offsets, pages, checksum, deadline_s)
    return checksums


def _copier_for(pages: Sequence[PageBuffers], checksum: bool) -> ModuleType:
    """Pages of a call are of one length."""
    is_short = checksum and bool(pages) and sum(map(len, pages[0])) < LEAST_HASHED_BYTES
    return plain if is_short else compiled() or plain
