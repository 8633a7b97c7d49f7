"""The `Compressor` contract, and the stored form of a page.

A compressor is found by the entry point group `pdserve.kvpool.codecs`. The entry point's name is the value of
`compression`, at most 8 ASCII characters: each stored page has it.
"""

from __future__ import annotations

from typing import Final, Protocol, TypeAlias

import msgspec

from pdserve.kvpool.tiers.base import PageMemory, TierPage

GROUP: Final = "pdserve.kvpool.codecs"
MAX_NAME_BYTES: Final = 8
Coding: TypeAlias = tuple[int, bytes, int]
"""Stored bytes, name of the compressor, number of the cipher."""
AS_IT_IS: Final[Coding] = (0, b"", 0)


class StoredPage(msgspec.Struct, frozen=True, gc=False):
    """What is written of a page. `data`: whole blocks, on a block's boundary. `digest`: of the bytes that
    count.
    """

    page: TierPage
    data: PageMemory
    digest: int
    coding: Coding = AS_IT_IS

    @property
    def size_bytes(self) -> int:
        """The bytes of `data` that count."""
        return self.coding[0] or self.page.length_bytes


class Compressor(Protocol):
    """Lossless compression of one page. Called from several threads; `Kind()` makes one for a tier.

    Stored bytes are hostile input. `decompress` must not write beyond the page, and must not take more memory
    than a small multiple of it.
    """

    def compress(self, page: memoryview, item_bytes: int) -> bytes:
        """The stored form. `item_bytes`: the size of one number in the page, or 1."""
        ...

    def decompress(self, stored: memoryview, page: memoryview) -> None:
        """Fill the page. Raises ValueError if the stored bytes do not make exactly this page."""
        ...
