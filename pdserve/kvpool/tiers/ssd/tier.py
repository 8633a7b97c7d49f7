"""The SSD tier: append-only segment files, written in batches with direct I/O, dropped as a whole.

    <path>/lock               locked by the node that uses the directory
           00000042.seg       segment_format.py; the segment with the largest number is being written
           namespaces.json    in the first tier: the node's list of namespaces, for a start after a reboot

The index (segment_index.py) is in memory, about 200 bytes per page. A start reads it from the segments'
footers, newest segment last, so the newest of several records of a page counts. A reader keeps the file of
its segment open until it ends, so a segment can be dropped at any time.

segment_index.py decides how to make room. `maintain` does it in small steps, so a write waits for at most a
few MiB. The tier keeps room for one more segment than the one being written, because compaction moves pages
there. If writes are faster than compaction, the oldest segment is dropped with its pages.

No block is overwritten in place, so a crash loses only unsynced records: those of about the last second.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import secrets
import stat
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

from pdserve.errors import ConfigError, StartupError
from pdserve.kvpool.tiers.base import (
    CORRUPT,
    GONE,
    LOADED,
    READ_FAILED,
    REFUSED,
    STORED,
    WRITE_FAILED,
    PageMemory,
    PageName,
    PutResult,
    ReadResult,
    TierPage,
    TierSettings,
    page_memories,
)
from pdserve.kvpool.tiers.durable_files import (
    NotOurs,
    claim_directory,
    read_options,
    read_text,
    save_text,
)
from pdserve.kvpool.tiers.encryption import OVERHEAD_BYTES
from pdserve.kvpool.tiers.page_codec import CodecOptions, StoredPage, make_codec
from pdserve.kvpool.tiers.ssd.segment_file import SegmentFile, segment_name
from pdserve.kvpool.tiers.ssd.segment_format import (
    BLOCK_BYTES,
    MAX_NUMBER,
    MAX_SEGMENT_BYTES,
    SegmentHeader,
    footer_blocks,
    record_blocks,
)
from pdserve.kvpool.tiers.ssd.segment_index import (
    MAX_BATCH_PAGES,
    Compact,
    Drop,
    Plan,
    SegmentIndex,
    make_room,
)
from pdserve.sizes import parse_bytes

logger = logging.getLogger(__name__)

MAX_BATCH_BYTES: Final = 64 << 20  # per write, but at least one page
MAX_PAGE_BYTES: Final = 1 << 30
COMPACT_STEP_BYTES: Final = 8 << 20
SCAN_BATCH_PAGES: Final = 1024  # a millisecond of the node's event loop
SYNC_INTERVAL_S: Final = 1.0
MIN_SEGMENTS: Final = 4  # least number of segments in the capacity


class SegmentOptions(CodecOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The SSD tier's `options`."""

    segment_bytes: int | str = 0
    """Size of one segment file, more than the largest page: space is freed by whole segments. 0: a 256th of
    the capacity, within reason.
    """
    direct: bool = True
    """Bypass the operating system's page cache."""


class SegmentTier:
    """A `Tier` on a local file system."""

    def __init__(self, settings: TierSettings) -> None:
        self._settings = settings
        self._path = settings.path
        self.capacity_bytes = settings.capacity_bytes
        options = read_options(settings, "ssd", SegmentOptions)
        self._segment_bytes = segment_bytes_of(settings, "ssd", options.segment_bytes)
        self._direct = options.direct
        self._codec = make_codec(settings, "ssd", options)
        self._lock_fd = claim_directory(settings)
        self._index: SegmentIndex[SegmentFile] = SegmentIndex()
        self._current: SegmentFile | None = None
        self._used_bytes = sum(map(_file_bytes, self._files()))
        self._last_number = max(map(_number, self._files()), default=0)
        self._headers = mmap.mmap(-1, MAX_BATCH_PAGES * BLOCK_BYTES)
        self._moving: tuple[Plan, int, int] | None = None  # plan in progress, next ordinal, moved bytes
        self._unsynced_since_s: float | None = None
        self._closed = False

    # --- what the tier is

    @property
    def used_bytes(self) -> int:
        """See `Tier`."""
        return self._used_bytes

    def namespaces(self) -> str | None:
        """See `Tier`."""
        return read_text(self._path / "namespaces.json")

    def save_namespaces(self, text: str | None) -> str:
        """See `Tier`."""
        return save_text(self._path / "namespaces.json", text)

    # --- starting

    def scan(self, known: Collection[int]) -> Iterator[list[TierPage]]:
        """See `Tier`. Footers are small: a million pages are 72 MB to read."""
        known = set(known)
        for path in self._files():
            try:
                segment = SegmentFile.open(path, direct=self._direct)
            except NotOurs as error:
                self._used_bytes -= _file_bytes(path)
                logger.warning("node %s: %s: left alone", self._settings.node, error.strerror)
                continue
            except OSError as error:
                logger.warning("node %s: %s: %s: left alone", self._settings.node, path, error.strerror)
                continue
            if segment is None:
                self._used_bytes -= _file_bytes(path)
                logger.warning("node %s: %s is no segment and is removed", self._settings.node, path)
                path.unlink(missing_ok=True)
                continue
            pages = self._adopt(segment, known)
            for first in range(0, len(pages), SCAN_BATCH_PAGES):
                yield pages[first : first + SCAN_BATCH_PAGES]

    def _adopt(self, segment: SegmentFile, known: set[int]) -> list[TierPage]:
        """Index the pages of known spaces in a found segment. Returns these pages. Void ones are erased: an
        earlier process may have been killed while it did that.
        """
        self._last_number = max(self._last_number, segment.number)
        before, was_sealed, erased = segment.file_bytes, segment.sealed, segment.erased()
        void = {n for n, space in enumerate(segment.spaces()) if space not in known or n in erased}
        try:
            if void:
                segment.leave_out(void)
                erased = set()
        except OSError as error:
            text = "node %s: %s: void pages are not erased: %s"
            logger.warning(text, self._settings.node, segment.path, error.strerror)
        if void and not len(segment):
            self._used_bytes -= before
            segment.remove()
            segment.close()
            return []
        pages = segment.take_pages()
        valid = [(n, page) for n, page in enumerate(pages) if page.space in known and n not in erased]
        self._index.add_segment(segment)
        self._index.insert(segment, [ordinal for ordinal, _ in valid])
        if not was_sealed:
            text = "node %s: %s was not sealed: %d pages found in it"
            logger.info(text, self._settings.node, segment.path, len(segment))
        if not segment.sealed:
            self._seal(segment)
            self._used_bytes += segment.file_bytes - before
        return [page for _, page in valid]

    def _files(self) -> list[Path]:
        return sorted(self._path.glob("*.seg"))

    # --- writing

    def put(self, pages: Sequence[TierPage], data: Sequence[PageMemory]) -> PutResult:
        """See `Tier`."""
        statuses = [STORED] * len(pages)
        error = ""
        batch: list[int] = []
        size = 0
        for place, page in enumerate(pages):
            if not self._fits_a_segment(page.length_bytes):
                statuses[place] = REFUSED
                continue
            if batch and (len(batch) == MAX_BATCH_PAGES or size + page.length_bytes > MAX_BATCH_BYTES):
                error = self._put_batch(pages, data, batch, statuses) or error
                batch, size = [], 0
            batch.append(place)
            size += page.length_bytes
        if batch:
            error = self._put_batch(pages, data, batch, statuses) or error
        return PutResult(statuses, error)

    def _put_batch(
        self, pages: Sequence[TierPage], data: Sequence[PageMemory], batch: list[int], statuses: list[int]
    ) -> str:
        stored = [self._encode(pages[place], data[place]) for place in batch]
        done = 0
        try:
            while done < len(batch):
                done += self._append(stored[done:])
        except OSError as error:
            for place in batch[done:]:
                statuses[place] = WRITE_FAILED
            return f"{self._path}: {error.strerror or error}"
        return ""

    def _encode(self, page: TierPage, memory: PageMemory) -> StoredPage:
        return self._codec.encode(page, memory, self._settings.facts(page.space))

    def _append(self, stored: Sequence[StoredPage]) -> int:
        """Append as many of these pages as fit into one segment, at least one. Raises OSError."""
        sizes = [one.size_bytes for one in stored]
        segment = self._segment_for(sizes)
        fitting = segment.fits(sizes)
        first = segment.append(stored[:fitting], self._headers)
        self._index.insert(segment, range(first, first + fitting))
        if self._unsynced_since_s is None:
            self._unsynced_since_s = time.monotonic()
        return fitting

    def _fits_a_segment(self, length_bytes: int) -> bool:
        more_bytes = 0 if self._codec.plain else OVERHEAD_BYTES
        blocks = 1 + record_blocks(length_bytes + more_bytes) + footer_blocks(1)
        return length_bytes <= MAX_PAGE_BYTES and blocks * BLOCK_BYTES <= self._segment_bytes

    def _segment_for(self, lengths: Sequence[int]) -> SegmentFile:
        """The segment being written, with room for at least the first page. Raises OSError."""
        if self._current is not None and not self._current.fits(lengths[:1]):
            self._end_current()
        if self._current is None:
            while self.capacity_bytes - self._used_bytes < self._segment_bytes:
                if not self._drop_something():
                    raise OSError(errno.ENOSPC, "there is no room and nothing to drop")
            number = self._last_number + 1
            path = self._path / segment_name(number)
            header = SegmentHeader(number, secrets.randbits(64))
            segment = SegmentFile.create(path, header, self._segment_bytes, direct=self._direct)
            if self._direct and not segment.direct:
                self._direct = False
                logger.warning("node %s: %s has no direct I/O: using ordinary I/O", self._settings.node, path)
            self._last_number = number
            self._index.add_segment(segment)
            self._used_bytes += segment.file_bytes
            self._current = segment
        return self._current

    def _end_current(self) -> None:
        segment, self._current = self._current, None
        if segment is None:
            return
        before = segment.file_bytes
        if len(segment):
            self._seal(segment)
            self._used_bytes += segment.file_bytes - before
        else:
            self._remove(segment)

    def _seal(self, segment: SegmentFile) -> None:
        try:
            segment.seal()
        except OSError as error:  # the next start reads its records one by one
            logger.warning("node %s: %s is not sealed: %s", self._settings.node, segment.path, error.strerror)

    # --- reading

    def read(self, names: Sequence[PageName], into: Sequence[PageMemory]) -> list[ReadResult]:
        """See `Tier`. Pages are read in the order of the device."""
        results = [ReadResult(GONE)] * len(names)
        for _, ordinal, place, segment in self._index.pin(names):
            try:
                results[place] = self._read_one(segment, ordinal, names[place], into[place])
            finally:
                self._index.unpin(segment, ordinal, was_read=results[place].status == LOADED)
        return results

    def _read_one(self, segment: SegmentFile, ordinal: int, name: PageName, into: PageMemory) -> ReadResult:
        try:
            stored = segment.read(ordinal, into)
        except OSError as error:
            logger.warning("node %s: %s: %s", self._settings.node, segment.path, error.strerror)
            return ReadResult(READ_FAILED)
        if stored is None:
            return ReadResult(CORRUPT)
        return self._codec.decode(stored, into, self._settings.facts(name.space))

    # --- forgetting

    def forget(self, names: Sequence[PageName]) -> None:
        """See `Tier`."""
        self._index.forget(names)

    def forget_space(self, space: int) -> None:
        """See `Tier`."""
        self._index.forget_space(space)

    def erase(self, space: int, keys: Collection[bytes] | None = None) -> str:
        """See `Tier`. Segments of which nothing else is left are removed as a whole."""
        if keys is None:
            self._index.forget_space(space)
        else:
            self._index.forget_keys(space, keys)
        problem = ""
        for segment in list(self._index.segments.values()):
            ordinals = segment.records_of(space, keys)
            if ordinals and segment is not self._current and not segment.live_bytes:
                if self._moving is not None and self._moving[0].number == segment.number:
                    self._moving = None
                self._remove(segment)
            elif ordinals:
                problem = self._erase(segment, ordinals) or problem
        return problem

    def _erase(self, segment: SegmentFile, ordinals: Sequence[int]) -> str:
        try:
            segment.erase(ordinals)
        except OSError as error:
            return f"{segment.path}: {error.strerror or error}"
        return ""

    # --- room

    def maintain(self) -> bool:
        """See `Tier`."""
        self._sync_when_due()
        if self._moving is not None:
            self._step()
            return True
        plan = self._plan(2 * self._segment_bytes)
        if plan is None:
            return False
        self._moving = (plan, 0, 0)
        return True

    def _plan(self, wanted_bytes: int) -> Plan | None:
        facts = self._index.facts(but=self._current)
        return make_room(facts, self.capacity_bytes - self._used_bytes, wanted_bytes)

    def _step(self) -> None:
        """Move a few pages of the segment chosen for removal, or drop it."""
        assert self._moving is not None
        plan, ordinal, moved = self._moving
        segment = self._index.segments[plan.number]
        if isinstance(plan, Compact):
            budget = plan.budget_bytes - moved
            chosen, ordinal, size = self._index.choose(
                segment, ordinal, budget, COMPACT_STEP_BYTES, only_read=plan.only_read
            )
            if chosen and self._move(segment, chosen):
                self._moving = (plan, ordinal, moved + size)
                return
        self._moving = None
        if plan.number in self._index.segments:
            self._drop(segment)

    def _move(self, segment: SegmentFile, chosen: list[int]) -> bool:
        """Append these records to the current segment. False: there is no room or the write failed."""
        names = [
            PageName(segment.space(ordinal), segment.keys[ordinal], segment.length(ordinal))
            for ordinal in chosen
        ]
        memory = page_memories([name.length_bytes for name in names])
        stored = [
            self._encode(result.page, data)
            for result, data in zip(self.read(names, memory), memory, strict=True)
            if result.page is not None
        ]
        done = 0
        try:
            while done < len(stored):
                if not self._can_append(stored[done].size_bytes):
                    return False  # no place to move to: the other pages are dropped with the segment
                done += self._append(stored[done:])
        except OSError as error:
            logger.warning("node %s: %s: %s", self._settings.node, self._path, error.strerror)
            return False
        return True

    def _can_append(self, length_bytes: int) -> bool:
        """Whether the page fits without dropping a segment."""
        current = self._current
        room = self.capacity_bytes - self._used_bytes
        if current is not None:
            if current.fits([length_bytes]):
                return True
            blocks = current.end_block + footer_blocks(len(current))
            room += current.file_bytes - blocks * BLOCK_BYTES  # freed when it is sealed
        return room >= self._segment_bytes

    def _drop_something(self) -> bool:
        """Drop a segment now to make room. False: there is none to drop."""
        if self._moving is not None:
            number = self._moving[0].number
            self._moving = None
        else:
            plan = self._plan(self._segment_bytes)
            if plan is None:
                return False
            number = plan.number
            if not isinstance(plan, Drop):
                number = min(self._index.segments)
        self._drop(self._index.segments[number])
        return True

    def _drop(self, segment: SegmentFile) -> None:
        leaving = self._index.live(segment)
        for first in range(0, len(leaving), SCAN_BATCH_PAGES):
            self._settings.leaving(leaving[first : first + SCAN_BATCH_PAGES])
        self._index.forget(leaving)
        self._remove(segment)

    def _remove(self, segment: SegmentFile) -> None:
        self._index.remove(segment)
        self._used_bytes -= segment.file_bytes
        segment.remove()

    # --- durability

    def _sync_when_due(self) -> None:
        since_s = self._unsynced_since_s
        if since_s is None or time.monotonic() < since_s + SYNC_INTERVAL_S:
            return
        self._unsynced_since_s = None
        if self._current is not None:
            try:
                self._current.sync()
            except OSError as error:
                logger.warning("node %s: %s: %s", self._settings.node, self._path, error.strerror)

    def close(self) -> None:
        """See `Tier`."""
        if self._closed:
            return
        self._closed = True
        self._end_current()
        self._index.close()
        os.close(self._lock_fd)


def segment_bytes_of(settings: TierSettings, kind: str, wanted: int | str) -> int:
    """The size of segments, in bytes. Raises ConfigError, StartupError."""
    where = f"node {settings.node}: tier {kind} at {settings.path}"
    try:
        segment_bytes = parse_bytes(wanted) or _usual_segment_bytes(settings.capacity_bytes)
        segment_bytes = segment_bytes // BLOCK_BYTES * BLOCK_BYTES
    except ValueError as error:
        raise ConfigError(f"{where}: segment_bytes: {error}") from error
    if not 1 << 16 <= segment_bytes <= MAX_SEGMENT_BYTES:
        raise ConfigError(f"{where}: segment_bytes must be between 64KiB and 64GiB")
    if settings.capacity_bytes < MIN_SEGMENTS * segment_bytes:
        raise StartupError(
            f"{where}: capacity_bytes of {settings.capacity_bytes} holds fewer than {MIN_SEGMENTS} segments "
            f"of {segment_bytes} bytes: raise it, or lower options.segment_bytes"
        )
    return segment_bytes


def _number(path: Path) -> int:
    """Of a file that has the name of a segment; else 0."""
    number = int(path.stem) if path.stem.isdecimal() else 0
    return number if number < MAX_NUMBER and path.name == segment_name(number) else 0


def _file_bytes(path: Path) -> int:
    """Of a regular file. A link, which may lead to anything, takes nothing of ours."""
    found = path.lstat()
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _usual_segment_bytes(capacity_bytes: int) -> int:
    """Bytes per segment: a few hundred files, so all can be open; at least 64 MiB if eight of them fit."""
    return min(max(capacity_bytes // 256, 64 << 20), 16 << 30, capacity_bytes // 8)
