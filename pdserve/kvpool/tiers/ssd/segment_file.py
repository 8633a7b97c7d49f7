"""One segment file: written once by the writer's thread, read by any thread. Format: segment_format.py.

Pages move between arena and device without a copy: direct I/O, one vectored call per batch. If the file
system refuses direct I/O, buffered I/O replaces it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from pdserve.kvpool.tiers.base import PageMemory, TierPage, padded
from pdserve.kvpool.tiers.durable_files import open_own
from pdserve.kvpool.tiers.page_codec import StoredPage
from pdserve.kvpool.tiers.ssd.segment_format import (
    BLOCK_BYTES,
    MAX_SEGMENT_BYTES,
    Record,
    SegmentHeader,
    encode_footer,
    encode_record_header,
    encode_segment_header,
    footer_blocks,
    read_index,
    record_blocks,
)
from pdserve.kvpool.tiers.ssd.segment_index import Segment

SCAN_CHUNK_BYTES: Final = 1 << 20
ZEROS_BYTES: Final = 1 << 20  # written at a time
_PUNCH_HOLE: Final = 1 | 2  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE
_scratch = threading.local()


class SegmentFile(Segment):
    """An open segment in a file."""

    def __init__(self, path: Path, fd: int, header: SegmentHeader, *, direct: bool) -> None:
        super().__init__(header)
        self.path = path
        self.direct = direct
        self.sealed = False
        self._fd = fd
        self._records: list[Record] = []  # for the footer

    # --- making

    @classmethod
    def create(cls, path: Path, header: SegmentHeader, size_bytes: int, *, direct: bool) -> SegmentFile:
        """Create a fully allocated file of this size. Raises OSError; then no file is left."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        fd = -1
        try:
            fd, direct = _open(path, flags, direct=direct)
            os.posix_fallocate(fd, 0, size_bytes)
            segment = cls(path, fd, header, direct=direct)
            segment.file_bytes = size_bytes
            head = _aligned(encode_segment_header(header))
            try:
                _write(fd, [head], 0)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                segment.direct = False  # some file systems accept O_DIRECT at open and refuse it later
                _clear_direct(fd)
                _write(fd, [head], 0)
        except OSError:
            if fd >= 0:  # else the file is not ours
                os.close(fd)
                path.unlink(missing_ok=True)
            raise
        return segment

    @classmethod
    def open(cls, path: Path, *, direct: bool) -> SegmentFile | None:
        """Open an existing file with its records. None: it is not a segment of this name.

        Raises OSError, also if read errors hide whether the file is a segment; NotOurs where the file is not
        to be touched.
        """
        fd = open_own(path, os.O_RDONLY)
        try:
            file_bytes = os.fstat(fd).st_size
            reads = _CachedReads(fd, file_bytes)
            found = read_index(reads, file_bytes) if file_bytes <= MAX_SEGMENT_BYTES else None
        finally:
            os.close(fd)
        if found is None:
            if reads.error is not None:
                raise reads.error
            return None
        if path.name != segment_name(found.header.number):  # another file was put in its place
            return None
        try:
            fd, direct = _open(path, os.O_RDWR, direct=direct)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES):
                raise
            fd, direct = _open(path, os.O_RDONLY, direct=direct)  # it can be read
        segment = cls(path, fd, found.header, direct=direct)
        segment.file_bytes = file_bytes
        for record in found.records:
            segment._append(record)
        segment.sealed = found.sealed
        return segment

    def take_pages(self) -> list[TierPage]:
        """The appended pages, in order. The list is dropped by the first call after `seal`."""
        records = self._records
        if self.sealed:
            self._records = []
        return [record.page for record in records]

    # --- writing

    def fits(self, lengths: Sequence[int]) -> int:
        """The number of pages of these lengths, from the first, that fit together with the footer."""
        end, count = self.end_block, len(self.keys)
        for fitting, length in enumerate(lengths):
            end += record_blocks(length)
            if end + footer_blocks(count + fitting + 1) > self.file_bytes // BLOCK_BYTES:
                return fitting
        return len(lengths)

    def append(self, stored: Sequence[StoredPage], headers: mmap.mmap) -> int:
        """Write records that fit (see `fits`). Returns the ordinal of the first one.

        `headers`: a buffer with one block per page. Raises OSError; then nothing was appended.
        """
        buffers: list[memoryview | PageMemory] = []
        blocks = memoryview(headers)
        records = []
        at = self.end_block
        for place, one in enumerate(stored):
            encode_record_header(
                blocks, place * BLOCK_BYTES, self.nonce, at, one.page, one.digest, one.coding
            )
            buffers.append(blocks[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES])
            buffers.append(one.data[: padded(one.size_bytes)])
            records.append(Record(at, one.page, one.digest, *one.coding))
            at = records[-1].end_block
        _write(self._fd, buffers, self.end_block * BLOCK_BYTES)
        first = len(self.keys)
        for record in records:
            self._append(record)
        return first

    def seal(self) -> None:
        """Write the footer and free the unused rest of the file. Raises OSError; then it stays unsealed."""
        body = _aligned(encode_footer(self._records, self.end_block, self.nonce))
        _write(self._fd, [body], self.end_block * BLOCK_BYTES)
        end = self.end_block * BLOCK_BYTES + len(body)
        os.ftruncate(self._fd, end)
        os.fdatasync(self._fd)
        self.file_bytes = end
        self.sealed = True
        self._records = []

    def sync(self) -> None:
        """Make the written records durable (fdatasync). Raises OSError."""
        os.fdatasync(self._fd)

    def erase(self, ordinals: Sequence[int]) -> None:
        """Free the blocks of these records: they read as zeros from now on. Raises OSError."""
        runs: list[tuple[int, int]] = []  # neighbours are freed together
        for ordinal in sorted(ordinals):
            start = self.block(ordinal) * BLOCK_BYTES
            before = runs.pop() if runs and runs[-1][1] == start else (start, start)
            runs.append((before[0], start + self.record_bytes(ordinal)))
        for start, end in runs:
            _erase(self._fd, start, end - start)
        os.fdatasync(self._fd)

    def leave_out(self, ordinals: Collection[int]) -> None:
        """Erase these records and forget that they were there: before anything refers to a record, since the
        others get other ordinals. The segment is to be sealed again. Raises OSError; then nothing has changed
        but bytes of these records.
        """
        self.erase(sorted(ordinals))
        kept = [record for n, record in enumerate(self._records) if n not in ordinals]
        self.reset()
        self._records, self.sealed = [], False
        for record in kept:
            self._append(record)

    def erased(self) -> set[int]:
        """The records that were freed, now or at an earlier start."""
        found = os.fstat(self._fd)
        if found.st_blocks * 512 >= found.st_size:
            return set()
        return {n for n in range(len(self)) if _is_hole(self._fd, self.block(n) * BLOCK_BYTES)}

    def _append(self, record: Record) -> None:
        self._records.append(record)
        self.add(record)

    # --- reading

    def read(self, ordinal: int, into: PageMemory) -> StoredPage | None:
        """Read a record: its stored bytes come into `into` if the page is stored as it is, else into other
        memory. They are not checked.

        None: the header is damaged, or the page is longer than `into`. Raises OSError.
        """
        length, size = self.length(ordinal), padded(self.size(ordinal))
        if padded(length) > len(into):
            return None
        data = into if self.as_it_is(ordinal) else np.frombuffer(mmap.mmap(-1, size), np.uint8)
        head = _head()
        if _read(self._fd, [head, data[:size]], self.block(ordinal) * BLOCK_BYTES) != BLOCK_BYTES + size:
            return None
        record = self.record_in(head, ordinal)
        return None if record is None else record.stored(data)

    def close(self) -> None:
        """Close the file. Call it once."""
        os.close(self._fd)

    def remove(self) -> None:
        """Unlink the file. Its bytes are freed when the last reader ends."""
        with contextlib.suppress(OSError):  # a read-only file system: the next start finds it again
            self.path.unlink(missing_ok=True)


class _CachedReads:
    """Small forward reads of a file, through a buffer. Unreadable bytes are missing from the result."""

    def __init__(self, fd: int, file_bytes: int) -> None:
        self._fd = fd
        self._file_bytes = file_bytes
        self._at = 0
        self._chunk = b""
        self.error: OSError | None = None  # the last read error

    def __call__(self, offset: int, size: int) -> bytes:
        start = offset - self._at
        if not (start >= 0 and start + size <= len(self._chunk)):
            wanted = max(size, min(SCAN_CHUNK_BYTES, self._file_bytes - offset))
            try:
                self._chunk = self._read(offset, wanted)
            except OSError:
                try:
                    return self._read(offset, size)
                except OSError as error:
                    self.error = error
                    return b""
            self._at, start = offset, 0
        return self._chunk[start : start + size]

    def _read(self, offset: int, size: int) -> bytes:
        parts = []
        while size > 0:
            part = os.pread(self._fd, size, offset)
            if not part:
                break
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def segment_name(number: int) -> str:
    """The name of its file."""
    return f"{number:08}.seg"


def _open(path: Path, flags: int, *, direct: bool) -> tuple[int, bool]:
    """(descriptor, whether it uses direct I/O)."""
    if direct:
        try:
            return open_own(path, flags | os.O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            if flags & os.O_CREAT:
                path.unlink(missing_ok=True)  # a refused O_DIRECT may leave the created file
    return open_own(path, flags), False


def _clear_direct(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)


def _write(fd: int, buffers: Sequence[memoryview | mmap.mmap | PageMemory], offset: int) -> None:
    """Write all bytes. Raises OSError; a short write counts as a full disk."""
    wanted = sum(len(buffer) for buffer in buffers)
    written = os.pwritev(fd, buffers, offset)  # type: ignore[arg-type]
    if written != wanted:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _erase(fd: int, offset: int, size: int) -> None:
    """Punch a hole; where the file system knows none, write zeros. Raises OSError."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if fallocate(fd, _PUNCH_HOLE, offset, size) == 0:
        return
    zeros = mmap.mmap(-1, min(size, ZEROS_BYTES))
    for at in range(offset, offset + size, len(zeros)):
        _write(fd, [memoryview(zeros)[: offset + size - at]], at)


def _is_hole(fd: int, offset: int) -> bool:
    try:
        return os.lseek(fd, offset, os.SEEK_DATA) != offset
    except OSError as error:  # there are no data behind it
        return error.errno == errno.ENXIO


def _read(fd: int, buffers: Sequence[memoryview | mmap.mmap | PageMemory], offset: int) -> int:
    return os.preadv(fd, buffers, offset)  # type: ignore[arg-type]


def _aligned(data: bytes) -> mmap.mmap:
    """A copy of the bytes (whole blocks) in memory aligned for direct I/O."""
    memory = mmap.mmap(-1, len(data))
    memory.write(data)
    return memory


def _head() -> memoryview:
    """An aligned block that belongs to this thread."""
    head = getattr(_scratch, "head", None)
    if head is None:
        head = _scratch.head = memoryview(mmap.mmap(-1, BLOCK_BYTES))
    found: memoryview = head
    return found
