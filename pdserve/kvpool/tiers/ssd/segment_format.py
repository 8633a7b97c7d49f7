"""The format of segment files: encoding and decoding of records. Pure.

A segment is a file of 4 KiB blocks, written once from start to end and never changed:

    block   0           segment header: magic, version, number, nonce, guard
            1 ...       records: one header block, then the page's bytes, padded to whole blocks
            n ...       index footer, when the segment is sealed: one entry of 72 bytes per record, padded
            last        trailer, when the segment is sealed: magic, version, count, where the footer starts,
                        checksum of the footer, nonce, guard

All numbers are little-endian. A record's header has space, key, length, the writer's checksum (0: none), the
digest of the stored bytes, sequence, its own block number, and for a page that is stored compressed or
encrypted the number of stored bytes, the compression and the cipher (tiers/page_codec.py); these are 0 for a
page that is stored as it is. A guard is XXH3-64 of all bytes before it in its block. These include the
segment's random nonce and the block's own number, so neither a block of an older file nor a page that
imitates a header is taken for one. A digest is XXH3-64 of the stored bytes, or the writer's checksum if there
is one and the page is stored as it is.

Opening a sealed segment reads its trailer and footer. If either is damaged, or the segment is not sealed (its
writer died), the records are read one by one. A block without a valid header is skipped, so damage costs only
its own record. A record whose bytes do not match its digest is left out, for example a torn last record.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

import msgspec
import numpy as np
import xxhash

from pdserve.kvpool.protocol.page_bytes import finish, start
from pdserve.kvpool.tiers.base import TIER_ALIGN_BYTES, PageMemory, TierPage, padded
from pdserve.kvpool.tiers.page_codec import AS_IT_IS, Coding, StoredPage

BLOCK_BYTES: Final = TIER_ALIGN_BYTES
FORMAT_VERSION: Final = 1
MAX_PAGE_BYTES: Final = 2 << 30
MAX_SEGMENT_BYTES: Final = 64 << 30
MAX_NUMBER: Final = 1 << 63  # of a file from elsewhere; those that the tier counts itself stay far below
SCAN_PIECE_BYTES: Final = 4 << 20

_SEGMENT_MAGIC: Final = int.from_bytes(b"PDVSeg01", "little")
_RECORD_MAGIC: Final = int.from_bytes(b"PDVRec01", "little")
_TRAILER_MAGIC: Final = int.from_bytes(b"PDVEnd01", "little")

_SEGMENT = struct.Struct("<QQQQ")  # magic, version, number, nonce
_RECORD = struct.Struct("<QQQQ32sQQQQQQQQ")
# magic, version, nonce, block, key, space, length, checksum, digest, sequence, stored bytes, compression,
# cipher
_TRAILER = struct.Struct("<QQQQQQ")  # magic, version, nonce, count, first block and checksum of the footer
_GUARD = struct.Struct("<Q")

ENTRY_DTYPE: Final = np.dtype(
    [
        ("key", "V32"),
        ("block", "<u4"),
        ("stored_bytes", "<u4"),  # 0: stored as it is
        ("length_bytes", "<u8"),
        ("checksum", "<u8"),
        ("sequence", "<u8"),
        ("space", "<u8"),
    ]
)

Bytes: TypeAlias = bytes | bytearray | memoryview
ReadAt: TypeAlias = Callable[[int, int], Bytes]
"""(offset, size) -> at most `size` bytes of the file; fewer at its end or at a read error."""


class Record(msgspec.Struct, frozen=True, gc=False):
    """A page and the first block of its record.

    `digest` is 0 if the record was read from a footer; then compression and cipher are unset too.
    `stored_bytes`: 0 if the page is stored as it is.
    """

    block: int
    page: TierPage
    digest: int = 0
    stored_bytes: int = 0
    compression: int = 0
    cipher: int = 0

    @property
    def size_bytes(self) -> int:
        """The number of bytes behind the header."""
        return self.stored_bytes or self.page.length_bytes

    @property
    def end_block(self) -> int:
        return self.block + record_blocks(self.size_bytes)

    def stored(self, data: PageMemory) -> StoredPage:
        """With the bytes that were found behind the header."""
        return StoredPage(self.page, data, self.digest, (self.stored_bytes, self.compression, self.cipher))


class SegmentHeader(msgspec.Struct, frozen=True):
    """The contents of a segment's first block."""

    number: int
    nonce: int


class SegmentContents(msgspec.Struct, frozen=True):
    """The header and records of a segment file. `sealed`: they come from its footer."""

    header: SegmentHeader
    records: list[Record]
    sealed: bool


class Footer(msgspec.Struct, frozen=True):
    """The trailer's description of the footer in blocks [first_block, last block of the file)."""

    count: int
    first_block: int
    digest: int


def record_blocks(length_bytes: int) -> int:
    """Number of blocks of a record with a page of this length, including the header."""
    return 1 + padded(length_bytes) // BLOCK_BYTES


def footer_blocks(count: int) -> int:
    """Number of blocks of footer and trailer for `count` records."""
    return 1 + padded(count * ENTRY_DTYPE.itemsize) // BLOCK_BYTES


# --- blocks


def encode_segment_header(header: SegmentHeader) -> bytes:
    """The header as one block."""
    return _block(_SEGMENT.pack(_SEGMENT_MAGIC, FORMAT_VERSION, header.number, header.nonce))


def decode_segment_header(block: Bytes) -> SegmentHeader | None:
    """The header, or None if the block is not the header of a segment of this version."""
    if not _guarded(block, _SEGMENT):
        return None
    magic, version, number, nonce = _SEGMENT.unpack_from(block)
    if (magic, version) != (_SEGMENT_MAGIC, FORMAT_VERSION) or number >= MAX_NUMBER:
        return None
    return SegmentHeader(number, nonce)


def encode_record_header(
    buffer: bytearray | memoryview,
    at: int,
    nonce: int,
    block: int,
    page: TierPage,
    digest: int,
    coding: Coding = AS_IT_IS,
) -> None:
    """Write a record's header into `buffer` at `at`; the rest of its block must be zero or old headers'."""
    fields = (page.key, page.space, page.length_bytes, page.checksum, digest, page.sequence)
    _RECORD.pack_into(buffer, at, _RECORD_MAGIC, FORMAT_VERSION, nonce, block, *fields, *coding)
    guard = xxhash.xxh3_64_intdigest(memoryview(buffer)[at : at + _RECORD.size])
    _GUARD.pack_into(buffer, at + _RECORD.size, guard)


def decode_record_header(block_bytes: Bytes, nonce: int, block: int) -> Record | None:
    """The record that starts at this block, or None."""
    if not _guarded(block_bytes, _RECORD):
        return None
    *head, key, space, length, checksum, digest, sequence, stored_bytes, compression, cipher = (
        _RECORD.unpack_from(block_bytes)
    )
    if head != [_RECORD_MAGIC, FORMAT_VERSION, nonce, block]:
        return None
    if not 0 < length <= MAX_PAGE_BYTES or stored_bytes > MAX_PAGE_BYTES:
        return None
    if bool(stored_bytes) != bool(compression or cipher):
        return None
    page = TierPage(space, key, length, checksum, sequence)
    return Record(block, page, digest, stored_bytes, compression, cipher)


def encode_footer(records: Sequence[Record], first_block: int, nonce: int) -> bytes:
    """Footer and trailer, whole blocks, to be written at `first_block`."""
    entries = np.zeros(len(records), ENTRY_DTYPE)
    if records:
        pages = [record.page for record in records]
        entries["key"] = np.frombuffer(b"".join(page.key for page in pages), "V32")
        entries["block"] = [record.block for record in records]
        entries["space"] = np.array([page.space for page in pages], "<u8")
        entries["length_bytes"] = [page.length_bytes for page in pages]
        entries["checksum"] = np.array([page.checksum for page in pages], "<u8")
        entries["sequence"] = np.array([page.sequence for page in pages], "<u8")
        entries["stored_bytes"] = [record.stored_bytes for record in records]
    body = entries.tobytes()
    body += bytes(padded(len(body)) - len(body))
    digest = xxhash.xxh3_64_intdigest(body)
    trailer = _TRAILER.pack(_TRAILER_MAGIC, FORMAT_VERSION, nonce, len(records), first_block, digest)
    return body + _block(trailer)


def decode_trailer(block_bytes: Bytes, segment: SegmentHeader, block: int) -> Footer | None:
    """Decode the file's last block, number `block`. None: it is not the trailer of this segment."""
    if not _guarded(block_bytes, _TRAILER):
        return None
    magic, version, of_segment, count, first_block, digest = _TRAILER.unpack_from(block_bytes)
    if (magic, version, of_segment) != (_TRAILER_MAGIC, FORMAT_VERSION, segment.nonce):
        return None
    if first_block < 1 + 2 * count or first_block + footer_blocks(count) != block + 1:
        return None  # a record has two blocks at least
    return Footer(count, first_block, digest)


def decode_footer(body: Bytes, footer: Footer) -> list[Record] | None:
    """The records in order, or None if the footer is damaged. `body`: its blocks without the trailer."""
    if xxhash.xxh3_64_intdigest(body) != footer.digest:
        return None
    if len(body) < footer.count * ENTRY_DTYPE.itemsize:
        return None
    entries = np.frombuffer(body, ENTRY_DTYPE, footer.count)
    lengths, starts, stored = entries["length_bytes"], entries["block"], entries["stored_bytes"].astype("<u8")
    if (lengths < 1).any() or (lengths > MAX_PAGE_BYTES).any() or (stored > MAX_PAGE_BYTES).any():
        return None
    sizes = np.where(stored > 0, stored, lengths)
    ends = starts + (sizes + np.uint64(2 * BLOCK_BYTES - 1)) // np.uint64(BLOCK_BYTES)
    if (starts[:1] < 1).any() or (starts[1:] < ends[:-1]).any() or (ends > footer.first_block).any():
        return None  # two records share bytes, or one lies outside
    columns = (
        entries[name].tolist() for name in ("block", "space", "key", "length_bytes", "checksum", "sequence")
    )
    return [
        Record(block, TierPage(*rest), 0, size)
        for size, block, *rest in zip(stored.tolist(), *columns, strict=True)
    ]


# --- whole segments


def read_index(read: ReadAt, file_bytes: int) -> SegmentContents | None:
    """The header and records of a file, or None if it is not a segment.

    If there is no valid footer, every record's bytes are read and checked.
    """
    header = decode_segment_header(read(0, BLOCK_BYTES))
    if header is None:
        return None
    records = _read_footer(read, file_bytes, header)
    if records is not None:
        return SegmentContents(header, records, sealed=True)
    return SegmentContents(header, list(scan_records(read, file_bytes, header)), sealed=False)


def read_sealed(read: ReadAt, file_bytes: int) -> SegmentContents | None:
    """The header and records of a sealed segment, from its first block and its footer; else None."""
    header = decode_segment_header(read(0, BLOCK_BYTES))
    records = _read_footer(read, file_bytes, header) if header is not None else None
    return (
        SegmentContents(header, records, sealed=True) if header is not None and records is not None else None
    )


def _read_footer(read: ReadAt, file_bytes: int, header: SegmentHeader) -> list[Record] | None:
    last = file_bytes // BLOCK_BYTES - 1
    footer = decode_trailer(read(last * BLOCK_BYTES, BLOCK_BYTES), header, last) if last > 0 else None
    if footer is None:
        return None
    size = (last - footer.first_block) * BLOCK_BYTES
    return decode_footer(read(footer.first_block * BLOCK_BYTES, size), footer)


def scan_records(read: ReadAt, file_bytes: int, segment: SegmentHeader) -> Iterator[Record]:
    """All undamaged records, found by their headers and checked against their digests."""
    blocks = file_bytes // BLOCK_BYTES
    block = 1
    while block < blocks:
        head = read(block * BLOCK_BYTES, BLOCK_BYTES)
        record = decode_record_header(head, segment.nonce, block)
        if record is None:
            block = _next_candidate(read, block + 1, blocks)
            continue
        if record.end_block > blocks:
            block += 1
            continue
        if _digest(read, (block + 1) * BLOCK_BYTES, record.size_bytes) == record.digest:
            yield record
        block = record.end_block


def _digest(read: ReadAt, offset: int, length: int) -> int | None:
    """Of these bytes, in pieces: a header may say any length. None: they cannot be read."""
    running = start()
    while length:
        piece = read(offset, min(length, SCAN_PIECE_BYTES))
        if not piece:
            return None
        running.update(piece)
        offset, length = offset + len(piece), length - len(piece)
    return finish(running)


def _next_candidate(read: ReadAt, block: int, blocks: int) -> int:
    """The next block that begins like a record, or `blocks`."""
    step = 256
    while block < blocks:
        chunk = read(block * BLOCK_BYTES, min(step, blocks - block) * BLOCK_BYTES)
        whole = len(chunk) // BLOCK_BYTES
        if not whole:  # a read error
            block += 1
            continue
        words = np.frombuffer(chunk, "<u8", whole * BLOCK_BYTES // 8)[:: BLOCK_BYTES // 8]
        found = np.flatnonzero(words == np.uint64(_RECORD_MAGIC))
        if len(found):
            return block + int(found[0])
        block += whole
    return blocks


def _block(head: bytes) -> bytes:
    guard = _GUARD.pack(xxhash.xxh3_64_intdigest(head))
    return head + guard + bytes(BLOCK_BYTES - len(head) - len(guard))


def _guarded(block: Bytes, layout: struct.Struct) -> bool:
    if len(block) < layout.size + _GUARD.size:
        return False
    (guard,) = _GUARD.unpack_from(block, layout.size)
    return bool(guard == xxhash.xxh3_64_intdigest(memoryview(block)[: layout.size]))
