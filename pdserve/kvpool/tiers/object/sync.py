"""The thread that speaks to the bucket: it removes, uploads and lists. Readers read by themselves.

    removals   before uploads, so that the bucket does not grow beyond its capacity
    uploads    sealed segments of the spool, in order; a spool file goes when its object is there
    listings   every `refresh_s`, and when a space was opened: segments of other nodes come and go

Writing and listing fail apart: where credentials allow reading only, pages of others are still found. After a
failure there is a pause (`Backoff`). Nothing is lost by one: what is to be done stays in inventory and
spool, and an upload that was cut off is done again under the same name with the same bytes.

Of a segment in the bucket the index is loaded once, and pages are read by range (`RemoteSegment`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from pdserve.kvpool.tiers.base import Backoff, PageMemory, TierPage, TierSettings, padded
from pdserve.kvpool.tiers.durable_files import open_own
from pdserve.kvpool.tiers.object.bucket import Bucket, NoSuchObject, StoreError
from pdserve.kvpool.tiers.object.inventory import PREFIX, Inventory, OpenSpaces, SegmentObject, parse_object
from pdserve.kvpool.tiers.page_codec import StoredPage
from pdserve.kvpool.tiers.ssd.segment_file import SegmentFile
from pdserve.kvpool.tiers.ssd.segment_format import BLOCK_BYTES, SegmentHeader, read_sealed, record_blocks
from pdserve.kvpool.tiers.ssd.segment_index import Segment, SegmentIndex

TAIL_BYTES: Final = 256 << 10  # read for the index: footers of up to 3,500 records
RUN_BYTES: Final = 8 << 20  # most bytes of one request, but at least one page
GAP_BYTES: Final = 64 << 10  # bytes between two pages that are rather read than asked for apart


class RemoteSegment(Segment):
    """A segment in the bucket. `absent`: the store said that it is gone."""

    def __init__(self, one: SegmentObject, header: SegmentHeader) -> None:
        super().__init__(header)
        self.object = one
        self.file_bytes = one.size_bytes
        self.absent = False


def load_segment(bucket: Bucket, one: SegmentObject) -> RemoteSegment | None:
    """The segment with its records. None: the object is not what its name says. Raises StoreError.

    An object is hostile input: header, trailer and footer have guards that accidents do not pass, their
    numbers are checked, and each page is checked again when it is read.
    """
    tail_bytes = min(one.size_bytes, TAIL_BYTES)
    tail_at = one.size_bytes - tail_bytes
    tail = bucket.read(one.name, tail_at, tail_bytes)

    def read(offset: int, size: int) -> memoryview:
        if offset < tail_at:
            return bucket.read(one.name, offset, size)
        return tail[offset - tail_at : offset - tail_at + size]

    found = read_sealed(read, one.size_bytes)
    if found is None or (found.header.number, found.header.nonce) != (one.number, one.nonce):
        return None
    if any(record.page.space != one.space for record in found.records):
        return None
    segment = RemoteSegment(one, found.header)
    for record in found.records:
        segment.add(record)
    return segment


def read_pages(
    bucket: Bucket, segment: RemoteSegment, ordinals: Sequence[int], into: Sequence[PageMemory]
) -> Iterator[tuple[int, StoredPage | None]]:
    """(position in `ordinals`, stored page) for each; None: these bytes are not the page's. Pages that are
    stored as they are come into `into`. `ordinals` ascend. Raises StoreError.
    """
    first = 0
    while first < len(ordinals):
        start = segment.block(ordinals[first]) * BLOCK_BYTES
        end, next_run = start, first
        while next_run < len(ordinals):
            ordinal = ordinals[next_run]
            at = segment.block(ordinal) * BLOCK_BYTES
            until = at + record_blocks(segment.size(ordinal)) * BLOCK_BYTES
            if next_run > first and (at - end > GAP_BYTES or until - start > RUN_BYTES):
                break
            end, next_run = until, next_run + 1
        content = bucket.read(segment.object.name, start, end - start)
        for place in range(first, next_run):
            at = segment.block(ordinals[place]) * BLOCK_BYTES - start
            yield place, _stored(segment, ordinals[place], content[at:], into[place])
        first = next_run


def _stored(segment: RemoteSegment, ordinal: int, content: memoryview, into: PageMemory) -> StoredPage | None:
    record = segment.record_in(content[:BLOCK_BYTES], ordinal)
    length, size = segment.length(ordinal), segment.size(ordinal)
    if record is None or padded(length) > len(into):
        return None
    data = np.frombuffer(content[BLOCK_BYTES : BLOCK_BYTES + size], np.uint8)
    if segment.as_it_is(ordinal):
        into[:size] = data
        data = into
    return record.stored(data)


logger = logging.getLogger(__name__)

REMOVED_AT_A_TIME: Final = 64
LOADERS: Final = 8  # indexes loaded at a time
TRIES: Final = 3  # of an index that is not what its name says, before it is left alone
Index: TypeAlias = SegmentIndex[SegmentFile | RemoteSegment]


class BucketSync:
    """`recovered` is called after each complete listing."""

    def __init__(
        self,
        settings: TierSettings,
        bucket: Bucket,
        inventory: Inventory,
        index: Index,
        spaces: OpenSpaces,
        refresh_s: float,
        recovered: Callable[[], None],
    ) -> None:
        self._where = f"node {settings.node}: tier object"
        self._settings = settings
        self._bucket = bucket
        self._inventory = inventory
        self._index = index
        self._spaces = spaces
        self._refresh_s = refresh_s
        self._recovered = recovered
        self._changed = threading.Condition()
        self._uploads: deque[tuple[SegmentFile, SegmentObject]] = deque()
        self._refresh_at_s = 0.0
        self._writing = Backoff()
        self._listing = Backoff()
        self._bad: dict[str, int] = {}  # failed tries by name
        self._stopping = False
        self.is_writing = False  # it removes or uploads at this moment
        self._start: queue.SimpleQueue[list[TierPage] | None] | None = None  # takes what a start finds
        self._thread: threading.Thread | None = None

    # --- from the tier's threads

    def start(self, timeout_s: float) -> Iterator[list[TierPage]]:
        """Start the thread. Yields the pages that its first listing finds in this time; later ones are
        reported by `settings.found`.
        """
        found: queue.SimpleQueue[list[TierPage] | None] = queue.SimpleQueue()
        self._start = found
        self._thread = threading.Thread(target=self._run, name=self._where, daemon=True)
        self._thread.start()
        deadline_s = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Empty):
            while (pages := found.get(timeout=max(0.0, deadline_s - time.monotonic()))) is not None:
                yield pages
        with self._changed:
            self._start = None
        with contextlib.suppress(queue.Empty):
            while True:  # what came in the last moment
                yield found.get_nowait() or []

    def stop(self, timeout_s: float) -> None:
        """Try to upload what is there, and end the thread; not longer than this."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            if self._thread is not None:
                self._changed.wait_for(lambda: not self._uploads or self.failing, timeout_s)
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline_s - time.monotonic()))

    def upload(self, file: SegmentFile, one: SegmentObject) -> None:
        """Queue a sealed segment. The spool bounds the queue."""
        with self._changed:
            self._uploads.append((file, one))
            self._changed.notify_all()

    def cancel(self, number: int) -> bool:
        """Take a segment from the queue. False: it is not there."""
        with self._changed:
            for queued in self._uploads:
                if queued[0].number == number:
                    self._uploads.remove(queued)
                    return True
        return False

    def wake(self, *, refresh: bool = False) -> None:
        """There are removals, or (`refresh`) the bucket is to be listed soon."""
        with self._changed:
            if refresh:
                self._refresh_at_s = 0.0
            self._changed.notify_all()

    def wait_for_room(self, enough: Callable[[], bool], timeout_s: float) -> bool:
        """Wait while uploads go on, until this is true."""
        with self._changed:
            self._changed.wait_for(lambda: enough() or self.failing or self._stopping, timeout_s)
        return enough()

    @property
    def failing(self) -> bool:
        """Whether the last write to the bucket failed."""
        return self._writing.failures > 0

    # --- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._due(), self._pause_s())
                if self._stopping:
                    return
            if time.monotonic() >= max(self._refresh_at_s, self._listing.retry_at_s):
                self._try(self._listing, self._refresh_and_report, "list")
            if time.monotonic() >= self._writing.retry_at_s and self._has_writes and not self._stopping:
                self.is_writing = True
                self._try(self._writing, self._write_some, "write to")
            with self._changed:
                self.is_writing = False
                self._changed.notify_all()

    @property
    def _has_writes(self) -> bool:
        return bool(self._uploads or self._inventory.to_remove(1))

    def _due(self) -> bool:
        now_s = time.monotonic()
        writes = self._has_writes and now_s >= self._writing.retry_at_s
        return writes or now_s >= max(self._refresh_at_s, self._listing.retry_at_s)

    def _pause_s(self) -> float:
        next_s = max(self._refresh_at_s, self._listing.retry_at_s)
        if self._has_writes:
            next_s = min(next_s, self._writing.retry_at_s)
        return max(0.0, next_s - time.monotonic())

    def _try(self, backoff: Backoff, work: Callable[[], None], what: str) -> None:
        failing = backoff.failures > 0
        try:
            work()
        except (StoreError, OSError) as error:
            backoff.failed(time.monotonic())
            if not failing:
                logger.warning("%s: cannot %s the bucket for now: %s", self._where, what, error)
        except Exception:  # boundary: a mistake must not end the thread
            backoff.failed(time.monotonic())
            logger.exception("%s", self._where)
        else:
            if failing:
                logger.info("%s: can %s the bucket again", self._where, what)
            backoff.worked()

    # --- writing

    def _write_some(self) -> None:
        while some := self._inventory.to_remove(REMOVED_AT_A_TIME):
            self._bucket.remove([one.name for one in some])
            self._inventory.removed(some)
        with self._changed:
            queued = self._uploads[0] if self._uploads else None
        if queued is not None:
            self._upload(*queued)

    def _upload(self, file: SegmentFile, one: SegmentObject) -> None:
        if not self._inventory.has(one):  # else it was uploaded before a restart
            self._bucket.write(one.name, _content(file.path))
        if self._stopping or not self.cancel(one.number):
            if not self._stopping:  # it became void meanwhile
                self._inventory.remove_soon(one)
            return
        self._inventory.uploaded(one)
        remote = RemoteSegment(one, SegmentHeader(file.number, file.nonce))
        if not self._index.replace(file, remote) or self._inventory.is_dropped(one):
            self._index.discard(one.number)
            self._inventory.remove_soon(one)
        file.remove()

    # --- listing

    def _refresh_and_report(self) -> None:
        try:
            for pages in self._refresh():
                self._report(pages)
        finally:
            with self._changed:
                if self._start is not None:
                    self._start.put(None)

    def _report(self, pages: list[TierPage]) -> None:
        with self._changed:
            start = self._start
            if start is not None:
                start.put(pages)
        if start is None:
            self._settings.found(pages)

    def _refresh(self) -> Iterator[list[TierPage]]:
        """List the bucket, and load the indexes of segments that are new here. Yields their pages, as this
        node names them. Raises StoreError.
        """
        self._refresh_at_s = time.monotonic() + self._refresh_s
        listed = [parse_object(name, size) for name, size in self._bucket.names(PREFIX)]
        for one in self._inventory.listed([one for one in listed if one is not None]):
            if lost := self._spaces.own_names(self._index.discard(one.number)):
                self._settings.lost(lost)
        wanted = [
            one
            for one in self._inventory.objects(self._spaces.namespaces())
            if one.number not in self._index.segments and self._bad.get(one.name, 0) < TRIES
        ]
        with ThreadPoolExecutor(LOADERS) as loaders:
            for first in range(0, len(wanted), LOADERS):
                if self._stopping:
                    return
                some = wanted[first : first + LOADERS]
                for one, segment in zip(some, loaders.map(self._load, some), strict=True):
                    if segment is not None and (pages := self._take_in(one, segment)):
                        yield pages
        self._recovered()

    def _load(self, one: SegmentObject) -> RemoteSegment | None:
        try:
            segment = load_segment(self._bucket, one)
        except NoSuchObject:
            return None
        if segment is None:
            self._bad[one.name] = self._bad.get(one.name, 0) + 1
            logger.warning("%s: %s is no segment: left alone", self._where, one.name)
        return segment

    def _take_in(self, one: SegmentObject, segment: RemoteSegment) -> list[TierPage]:
        if not self._index.add_segment(segment):
            return []
        # checked before, lest a reader finds a dropped page; and after, for what was dropped in between: with
        # the names made by then, lest they are of a space that was opened after that
        new = self._index.insert(segment, range(len(segment)), newest=True) if self._is_wanted(one) else []
        pages = self._spaces.own_pages(
            [TierPage(segment.space(n), segment.keys[n], segment.length(n), 0, 0) for n in new]
        )
        if not self._is_wanted(one):
            self._index.discard(one.number)
            return []
        return pages

    def _is_wanted(self, one: SegmentObject) -> bool:
        """Whether it was not dropped since it was listed."""
        return self._inventory.has(one) and self._spaces.namespace_of(one.space) == one.namespace


def _content(path: Path) -> bytes:
    with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        return file.read()
