"""From a page in memory to its stored form, and back: compressed first, then encrypted.

A page is compressed where that saves at least a sixteenth. A stored page is checked in this order: the digest
of the stored bytes, the tag of the cipher, the length after decompression, the writer's checksum.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta

from pdserve.errors import ConfigError
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
from pdserve.kvpool.tiers.codecs.base import GROUP, MAX_NAME_BYTES, Compressor, StoredPage
from pdserve.kvpool.tiers.codecs.encryption import AES_GCM, PageCipher, read_keys
from pdserve.settings.plugins import load

MOST_SHARE: Final = 15 / 16  # of the page: else it is stored uncompressed
NOBODY: Final = SpaceFacts("", "")


class CodecOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of tiers that can store pages in another form."""

    compression: Annotated[
        str, Meta(description="Lossless compression of pages: `zstd`, or another codec that is installed.")
    ] = ""
    keys: Annotated[str, Meta(description="File with the keys that encrypt pages. Empty: not encrypted.")] = (
        ""
    )


class PageCodec:
    """The stored form of a tier's pages. Thread-safe."""

    def __init__(self, compression: str = "", cipher: PageCipher | None = None) -> None:
        """Raises ConfigError: there is no such compression."""
        self.plain = not compression and cipher is None
        self._name = compression.encode()
        self._compressors: dict[bytes, Compressor] = {}
        self._cipher = cipher
        if compression:
            self._compressors[self._name] = _load(compression)

    def encode(self, page: TierPage, memory: PageMemory, facts: SpaceFacts | None) -> StoredPage:
        """The stored form of a page of this namespace."""
        length = page.length_bytes
        if self.plain:
            return StoredPage(page, memory, page.checksum or checksum_bytes(memory[:length].data))
        facts = facts or NOBODY
        body: memoryview | bytes = memory[:length].data
        compressor = b""
        if self._name:
            smaller = self._compressors[self._name].compress(memory[:length].data, facts.item_bytes)
            if len(smaller) <= MOST_SHARE * length:
                body, compressor = smaller, self._name
        cipher = 0
        if self._cipher is not None and self._cipher.covers(facts.name):
            body, cipher = self._cipher.seal(facts.name, page, compressor, body), AES_GCM
        if not compressor and not cipher:
            return StoredPage(page, memory, page.checksum or checksum_bytes(memory[:length].data))
        data = np.frombuffer(mmap.mmap(-1, padded(len(body))), np.uint8)
        data[: len(body)] = np.frombuffer(body, np.uint8)
        return StoredPage(page, data, checksum_bytes(body), (len(body), compressor, cipher))

    def decode(self, stored: StoredPage, into: PageMemory, facts: SpaceFacts | None) -> ReadResult:
        """Check the stored page, and bring it into memory."""
        page = stored.page
        if not self._bring(stored, into[: page.length_bytes], facts or NOBODY):
            return ReadResult(CORRUPT)
        return ReadResult(LOADED, page)

    def _bring(self, stored: StoredPage, into: PageMemory, facts: SpaceFacts) -> bool:
        page, (size, compressor, cipher) = stored.page, stored.coding
        data = stored.data[: stored.size_bytes].data
        if checksum_bytes(data) != stored.digest:
            return False
        covered = self._cipher is not None and self._cipher.covers(facts.name)
        if cipher or covered:
            opened = None
            if cipher == AES_GCM and self._cipher is not None:
                opened = self._cipher.open(facts.name, page, compressor, data)
            if opened is None:
                return False
            data = memoryview(opened)
        if not size:
            return True  # the bytes are in place
        if not compressor:
            if len(data) != len(into):
                return False
            into[:] = np.frombuffer(data, np.uint8)
        else:
            try:
                self._compressor(compressor).decompress(data, into.data)
            except (ValueError, ConfigError):
                return False
        return not page.checksum or checksum_bytes(into.data) == page.checksum

    def _compressor(self, name: bytes) -> Compressor:
        """Of a page that may have been stored under another configuration. Raises ConfigError, ValueError."""
        found = self._compressors.get(name)
        if found is None:
            found = self._compressors[name] = _load(name.decode("ascii"))
        return found


def make_codec(settings: TierSettings, kind: str, options: CodecOptions) -> PageCodec:
    """Raises ConfigError."""
    try:
        return PageCodec(options.compression, read_keys(Path(options.keys)) if options.keys else None)
    except ConfigError as error:
        raise ConfigError(f"node {settings.node}: tier {kind} at {settings.path}: {error}") from None


def _load(name: str) -> Compressor:
    """Raises ConfigError."""
    compressor: Compressor = load(GROUP, name, "compression", "codec")()
    if not name.isascii() or len(name) > MAX_NAME_BYTES:
        raise ConfigError(f"compression: {name!r} is no name of a codec: {MAX_NAME_BYTES} bytes of ASCII")
    return compressor
