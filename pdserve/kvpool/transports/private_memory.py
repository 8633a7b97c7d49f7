"""Private memory of this process that can show the bytes of a file, without a copy of them.

    show    a stretch shows the file's bytes; what is written into it here stays here (copy on write)
    own     all of it becomes this process's own, with the bytes that it shows now

What others write into the file is seen until then. So whoever reads such bytes asks afterwards whether they
were the right ones to the end.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from typing import Final, NamedTuple

import numpy as np

from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.kvpool.transports.page_residency import MADV_POPULATE_WRITE

BLOCK_BYTES: Final = mmap.PAGESIZE
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_PRIVATE: Final = mmap.MAP_PRIVATE | _MAP_NORESERVE
_WRITABLE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_FAILED: Final = ctypes.c_void_p(-1).value


class Region:
    """Zeros at first. `size_bytes` is rounded up to blocks of BLOCK_BYTES. Freed with its last array."""

    def __init__(self, size_bytes: int) -> None:
        """Raises OSError."""
        self.size_bytes = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
        self._memory = mmap.mmap(-1, self.size_bytes, flags=_PRIVATE | mmap.MAP_ANONYMOUS, prot=_WRITABLE)
        self.address: Final = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def array(self, start: int = 0, size_bytes: int = -1) -> Bytes1D:
        """uint8, shape [size_bytes] (-1: to the end); writable. It keeps the memory."""
        return np.frombuffer(self._memory, np.uint8, size_bytes, start)

    def show(self, file: int, offset: int, start: int, size_bytes: int) -> None:
        """[start, start + size_bytes) shows the file's bytes from `offset` on, all in whole blocks. `file`: a
        descriptor. Raises OSError and ValueError; then nothing has changed.
        """
        end = start + size_bytes
        blocks = start % BLOCK_BYTES == 0 == size_bytes % BLOCK_BYTES
        if not 0 <= start < end <= self.size_bytes or not blocks:  # else other memory would be mapped over
            raise ValueError(f"[{start}, {end}) are no whole blocks of a region of {self.size_bytes} bytes")
        place = self.address + start
        if _libc().mmap(place, size_bytes, _WRITABLE, _PRIVATE | _MAP_FIXED, file, offset) == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def own(self) -> None:
        """Show no file any more. Readers on other threads are not disturbed. Raises OSError."""
        if _libc().madvise(self.address, self.size_bytes, MADV_POPULATE_WRITE) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def free(self) -> bool:
        """Give the memory back now. False: an array still needs it."""
        try:
            self._memory.close()
        except BufferError:
            return False
        return True


class Stretch(NamedTuple):
    """The bytes [start, start + size_bytes) of a region."""

    region: Region
    start: int
    size_bytes: int


@functools.cache
def can_own() -> bool:
    """Whether the kernel knows `Region.own` (Linux 5.14)."""
    try:
        Region(BLOCK_BYTES).own()
    except OSError:
        return False
    return True


@functools.cache
def _libc() -> ctypes.CDLL:
    """Its calls release the GIL."""
    libc = ctypes.CDLL(None, use_errno=True)
    word, number = ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = [ctypes.c_void_p, word, number, number, number, ctypes.c_int64]
    libc.mmap.restype = ctypes.c_void_p
    libc.madvise.argtypes = [ctypes.c_void_p, word, number]
    return libc
