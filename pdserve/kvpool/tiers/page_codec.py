"""From a page in memory to its stored form, and back: compressed first, then encrypted.

The compression is Zstandard with byte shuffle: the first bytes of all numbers come first, then the second
bytes, and so on. The high bytes of KV numbers (sign and exponent) repeat, the low ones hardly do. A page is
stored compressed where that saves at least a sixteenth.

A stored page is checked in this order: the digest of the stored bytes, the tag of the cipher, the length
after decompression, the writer's checksum.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from types import ModuleType
from typing import Final, Literal, TypeAlias

import msgspec
import numpy as np

from pdserve.errors import ConfigError
from pdserve.extras import needed_by
from pdserve.kvpool.protocol.page_bytes import checksum_bytes
from pdserve.kvpool.tiers.base import (
    CORRUPT,
    LOADED,
    PageMemory,
    ReadResult,
    SpaceFacts,
    TierPage,
    TierSettings,
    padded,
)
from pdserve.kvpool.tiers.encryption import AES_GCM, PageCipher, read_keys

ZSTD: Final = 1  # number of the compression in a record
LEVEL: Final = 1  # higher levels take much longer and gain little on KV
MAX_ITEM_BYTES: Final = 8
MOST_SHARE: Final = 15 / 16  # of the page: else it is stored uncompressed
NOBODY: Final = SpaceFacts("", "")
Coding: TypeAlias = tuple[int, int, int]
"""Number of stored bytes, number of the compression, number of the cipher; 0 for none of each."""
AS_IT_IS: Final[Coding] = (0, 0, 0)


class StoredPage(msgspec.Struct, frozen=True, gc=False):
    """What is written of a page. `data`: whole blocks that start on a block's boundary. `digest`: of the
    bytes that count.
    """

    page: TierPage
    data: PageMemory
    digest: int
    coding: Coding = AS_IT_IS

    @property
    def size_bytes(self) -> int:
        """The number of bytes of `data` that count."""
        return self.coding[0] or self.page.length_bytes


class CodecOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of tiers that can store pages in another form."""

    compression: Literal["", "zstd"] = ""
    """Lossless compression of pages."""
    keys: str = ""
    """File with the keys that encrypt pages. Empty: not encrypted."""


class PageCodec:
    """The stored form of a tier's pages. Thread-safe. Reading does not depend on `compressed`."""

    def __init__(self, *, compressed: bool = False, cipher: PageCipher | None = None) -> None:
        """Raises ConfigError: the package for the compression is missing."""
        self.plain = not compressed and cipher is None
        self._compressed = compressed
        self._cipher = cipher
        if compressed:
            _zstandard()

    def encode(self, page: TierPage, memory: PageMemory, facts: SpaceFacts | None) -> StoredPage:
        """The stored form of a page of this namespace."""
        length = page.length_bytes
        facts = facts or NOBODY
        body: memoryview | bytes = memory[:length].data
        compression = cipher = 0
        if self._compressed:
            smaller = compress(memory[:length].data, facts.item_bytes)
            if len(smaller) <= MOST_SHARE * length:
                body, compression = smaller, ZSTD
        if self._cipher is not None and self._cipher.covers(facts.name):
            body, cipher = self._cipher.seal(facts.name, page, compression, body), AES_GCM
        if not compression and not cipher:
            return StoredPage(page, memory, page.checksum or checksum_bytes(memory[:length].data))
        data = np.frombuffer(mmap.mmap(-1, padded(len(body))), np.uint8)
        data[: len(body)] = np.frombuffer(body, np.uint8)
        return StoredPage(page, data, checksum_bytes(body), (len(body), compression, cipher))

    def decode(self, stored: StoredPage, into: PageMemory, facts: SpaceFacts | None) -> ReadResult:
        """Check the stored page, and bring it into memory."""
        page = stored.page
        if not self._bring(stored, into[: page.length_bytes], facts or NOBODY):
            return ReadResult(CORRUPT)
        return ReadResult(LOADED, page)

    def _bring(self, stored: StoredPage, into: PageMemory, facts: SpaceFacts) -> bool:
        page, (size, compression, cipher) = stored.page, stored.coding
        data = stored.data[: stored.size_bytes].data
        if checksum_bytes(data) != stored.digest:
            return False
        covered = self._cipher is not None and self._cipher.covers(facts.name)
        if cipher or covered:
            opened = None
            if cipher == AES_GCM and self._cipher is not None:
                opened = self._cipher.open(facts.name, page, compression, data)
            if opened is None:
                return False
            data = memoryview(opened)
        if not size:
            return True  # the bytes are in place
        if not compression:
            if len(data) != len(into):
                return False
            into[:] = np.frombuffer(data, np.uint8)
        else:
            try:
                decompress(data, into.data, compression)
            except (ValueError, ConfigError):
                return False
        return not page.checksum or checksum_bytes(into.data) == page.checksum


def make_codec(settings: TierSettings, kind: str, options: CodecOptions) -> PageCodec:
    """Raises ConfigError."""
    try:
        cipher = read_keys(Path(options.keys)) if options.keys else None
        return PageCodec(compressed=bool(options.compression), cipher=cipher)
    except ConfigError as error:
        raise ConfigError(f"node {settings.node}: tier {kind} at {settings.path}: {error}") from None


def compress(page: memoryview, item_bytes: int) -> bytes:
    """The compressed form: one byte with the size of a number, and a frame of Zstandard.

    `item_bytes`: the size of one number in the page, or 1 if it is unknown.
    """
    item = item_bytes if 1 < item_bytes <= MAX_ITEM_BYTES and len(page) % item_bytes == 0 else 1
    rows = np.frombuffer(page, np.uint8).reshape(-1, item)
    planes = np.ascontiguousarray(rows.T)
    frame: bytes = _zstandard().ZstdCompressor(level=LEVEL).compress(planes.data)
    return bytes([item]) + frame


def decompress(stored: memoryview, page: memoryview, compression: int = ZSTD) -> None:
    """Fill the page. `stored` is hostile input: no byte beyond the page is written, and little more memory
    than the page has is taken.

    Raises ValueError if the stored bytes do not make exactly this page, ConfigError if the package is
    missing.
    """
    zstandard = _zstandard()
    item = stored[0] if len(stored) > 1 else 0
    if compression != ZSTD or not 1 <= item <= MAX_ITEM_BYTES or len(page) % item:
        raise ValueError("no compressed page")
    try:
        frame = zstandard.get_frame_parameters(stored[1:])
        if frame.content_size != len(page):  # before as much memory is taken as the frame claims
            raise ValueError("a page of another length")
        planes = zstandard.ZstdDecompressor().decompress(stored[1:], allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
    if len(planes) != len(page):
        raise ValueError("a page of another length")
    rows = np.frombuffer(page, np.uint8).reshape(-1, item)
    for place, plane in enumerate(np.frombuffer(planes, np.uint8).reshape(item, -1)):
        rows[:, place] = plane  # NumPy takes six times as long for the transposed array at once


def _zstandard() -> ModuleType:
    """The package. Raises ConfigError where it is missing."""
    with needed_by('compression = "zstd"', "zstd"):
        import zstandard
    return zstandard
