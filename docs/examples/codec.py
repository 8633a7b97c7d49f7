"""A codec that stores how each row of numbers differs from the one before, then deflates it."""

from __future__ import annotations

import zlib

import numpy as np

LEVEL = 1


class DeltaCodec:
    """A `Compressor`: rows of `ROW` numbers, each as its difference from the row before."""

    ROW = 64

    def compress(self, page: memoryview, item_bytes: int) -> bytes:
        """One byte says how long a row is, in numbers; 0: the page is not made of rows."""
        numbers = np.frombuffer(page, np.uint8)
        row_bytes = self.ROW * item_bytes
        if item_bytes > 8 or len(numbers) % row_bytes:
            return b"\0" + zlib.compress(numbers.tobytes(), LEVEL)
        rows = numbers.reshape(-1, row_bytes)
        changes = rows.copy()
        changes[1:] -= rows[:-1]  # of bytes: they wrap around, and come back exactly
        return bytes([item_bytes]) + zlib.compress(changes.tobytes(), LEVEL)

    def decompress(self, stored: memoryview, page: memoryview) -> None:
        """Takes at most as much memory as the page, whatever the stored bytes say."""
        if len(stored) < 2 or stored[0] > 8:
            raise ValueError("no such page")
        inflate = zlib.decompressobj()
        try:
            found = inflate.decompress(stored[1:], len(page) + 1)
        except zlib.error as error:
            raise ValueError(str(error)) from None
        row_bytes = self.ROW * stored[0]
        if len(found) != len(page) or inflate.unconsumed_tail or (row_bytes and len(page) % row_bytes):
            raise ValueError("a page of another length")
        numbers = np.frombuffer(found, np.uint8)
        if row_bytes:
            numbers = np.cumsum(numbers.reshape(-1, row_bytes), axis=0, dtype=np.uint8).reshape(-1)
        np.frombuffer(page, np.uint8)[:] = numbers
