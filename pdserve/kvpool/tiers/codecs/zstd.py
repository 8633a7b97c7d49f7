"""Zstandard with byte shuffle: the bytes of the same place in all numbers come one after the other.

The high bytes of KV numbers (sign and exponent) repeat, the low ones hardly do.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pdserve.extras import needed_by

with needed_by('compression = "zstd"', "zstd"):
    import zstandard

LEVEL: Final = 1  # more takes much longer and gains little on KV
MAX_ITEM_BYTES: Final = 8


class Zstd:
    """A `Compressor`. The stored form is the size of a number, one byte, and a frame."""

    def compress(self, page: memoryview, item_bytes: int) -> bytes:
        """See `Compressor`."""
        item = item_bytes if 1 < item_bytes <= MAX_ITEM_BYTES and len(page) % item_bytes == 0 else 1
        rows = np.frombuffer(page, np.uint8).reshape(-1, item)
        planes = np.ascontiguousarray(rows.T)
        return bytes([item]) + zstandard.ZstdCompressor(level=LEVEL).compress(planes.data)

    def decompress(self, stored: memoryview, page: memoryview) -> None:
        """See `Compressor`."""
        item = stored[0] if len(stored) > 1 else 0
        if not 1 <= item <= MAX_ITEM_BYTES or len(page) % item:
            raise ValueError("no zstd page")
        try:
            frame = zstandard.get_frame_parameters(stored[1:])
            if frame.content_size != len(page):  # before so much memory is taken as it says
                raise ValueError("a page of another length")
            planes = zstandard.ZstdDecompressor().decompress(stored[1:], allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from None
        if len(planes) != len(page):
            raise ValueError("a page of another length")
        columns = np.frombuffer(planes, np.uint8).reshape(item, -1)
        np.frombuffer(page, np.uint8).reshape(-1, item)[:] = columns.T
