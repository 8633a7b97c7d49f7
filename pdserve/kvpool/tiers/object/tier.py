"""The object store tier: segments in a bucket of S3, Google Cloud Storage or Azure, shared by a pool's nodes.

    put    -> a segment on the local disk (spool.py), one for each namespace
    full, or older than flush_s -> uploaded as one object (sync.py), and dropped from the spool
    read   -> from the spool, or by range from the object (sync.py)

Each node indexes all segments of the namespaces that it has open, whoever wrote them: it lists the bucket and
reads their footers. So after a restart of all nodes every page is found again, also where nodes have other
names and other shares of the ring. About 400 bytes of memory per page in the bucket.

Who removes what (inventory.py): room is made by removing the oldest segments, whoever wrote them. A dropped
or cleared namespace is removed by every node that learns of it; `tombstones.json` keeps its segments void at
this node while the bucket is away. A page is forgotten by a node in its own index alone. Nobody rewrites or
moves an object. So the worst that two nodes do to each other is a miss.

    <path>/lock, <number>.seg, tombstones.json, namespaces.json (in the first tier, as in the SSD tier)

While reads fail, further ones fail at once for a moment, so no reader waits for a bucket that is away. Pages
that could not be read meanwhile are reported as found again after the next complete listing.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from pdserve.errors import ConfigError
from pdserve.kvpool.tiers.base import (
    CORRUPT,
    GONE,
    LOADED,
    READ_FAILED,
    REFUSED,
    STORED,
    WRITE_FAILED,
    Backoff,
    PageMemory,
    PageName,
    PutResult,
    ReadResult,
    TierPage,
    TierSettings,
)
from pdserve.kvpool.tiers.durable_files import (
    claim_directory,
    load_json,
    read_options,
    read_text,
    save_text,
    write_durably,
)
from pdserve.kvpool.tiers.encryption import OVERHEAD_BYTES
from pdserve.kvpool.tiers.object.bucket import Bucket, NoSuchObject, StoreError
from pdserve.kvpool.tiers.object.inventory import Inventory, OpenSpaces, SegmentObject, shared_space
from pdserve.kvpool.tiers.object.spool import Spool, no_space
from pdserve.kvpool.tiers.object.sync import BucketSync, Index, RemoteSegment, read_pages
from pdserve.kvpool.tiers.page_codec import CodecOptions, StoredPage, make_codec
from pdserve.kvpool.tiers.ssd.segment_file import SegmentFile
from pdserve.kvpool.tiers.ssd.segment_format import (
    BLOCK_BYTES,
    footer_blocks,
    record_blocks,
)
from pdserve.kvpool.tiers.ssd.segment_index import MAX_BATCH_PAGES, SegmentIndex
from pdserve.kvpool.tiers.ssd.tier import MAX_PAGE_BYTES, SCAN_BATCH_PAGES, segment_bytes_of
from pdserve.sizes import parse_bytes

logger = logging.getLogger(__name__)

SCAN_TIMEOUT_S: Final = 5.0  # of a start; what is not indexed by then is found later
ROOM_TIMEOUT_S: Final = 2.0  # that a put waits for uploads that go on
CLOSE_TIMEOUT_S: Final = 2.0
ERASE_TIMEOUT_S: Final = 20.0  # that an erasure waits for the store
MAX_UNREAD: Final = 1 << 16
MIN_SPOOL_SEGMENTS: Final = 2


class ObjectOptions(CodecOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The object store tier's `options`."""

    url: str
    """Bucket and prefix of the pool: `s3://`, `gs://`, `az://` or `file://`."""
    endpoint: str = ""
    """Address of the store, if not the cloud's own."""
    region: str = ""
    """Region of an S3 bucket; empty: from AWS_REGION."""
    anonymous: bool = False
    """Send S3 requests unsigned, without credentials."""
    segment_bytes: int | str = "64MiB"
    """Most bytes of one object; more than the largest page."""
    spool_bytes: int | str = "1GiB"
    """Most bytes on the local disk (`path`) that wait to be uploaded."""
    flush_s: Annotated[float, Meta(gt=0)] = 30.0
    """Time after which a segment is uploaded that is not full."""
    refresh_s: Annotated[float, Meta(gt=0)] = 30.0
    """Time between two listings, which find the segments of other nodes."""
    read_timeout_s: Annotated[float, Meta(gt=0)] = 5.0
    """Deadline of a read; a retry begins before it only."""
    timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    """The same for an upload or a listing."""


class ObjectTier:
    """A `Tier` and `SharedTier`."""

    def __init__(self, settings: TierSettings) -> None:
        self._settings = settings
        self._path = settings.path
        self.capacity_bytes = settings.capacity_bytes
        self._options = options = read_options(settings, "object", ObjectOptions)
        self._segment_bytes, self._spool_bytes = _sizes(settings, options)
        self._codec = make_codec(settings, "object", options)
        self._lock_fd = claim_directory(dataclasses.replace(settings, capacity_bytes=self._spool_bytes))
        try:
            self._bucket = _bucket(settings, options)
        except ConfigError:
            os.close(self._lock_fd)
            raise
        self._inventory = Inventory(load_json(self._path / "tombstones.json", dict[str, int], {}) or {})
        self._index: Index = SegmentIndex()
        self._spaces = OpenSpaces(settings.facts)
        self._sync = BucketSync(
            *(settings, self._bucket, self._inventory, self._index, self._spaces),
            options.refresh_s,
            self._report_unread,
        )
        self._spool = Spool(self._path, self._segment_bytes, self._inventory, self._sync.upload)
        self._reading = Backoff()
        self._unread_lock = threading.Lock()
        self._unread: dict[PageName, None] = {}  # not read for a failure of the store
        self._closed = False

    # --- what the tier is

    @property
    def used_bytes(self) -> int:
        """See `Tier`: all segments of the pool in the bucket, as far as known, and this node's spool."""
        return self._inventory.used_bytes

    def namespaces(self) -> str | None:
        """See `Tier`."""
        return read_text(self._path / "namespaces.json")

    def save_namespaces(self, text: str | None) -> str:
        """See `Tier`."""
        return save_text(self._path / "namespaces.json", text)

    # --- starting

    def open_space(self, space: int) -> None:
        """See `SharedTier`."""
        if self._spaces.open(space, again=True) is not None:
            self._sync.wake(refresh=True)

    def has(self, name: PageName) -> bool:
        """See `SharedTier`."""
        return self._index.holds(self._spaces.shared_name(name))

    def scan(self, known: Collection[int]) -> Iterator[list[TierPage]]:
        """See `Tier`. Segments that are not indexed in time are reported later by `settings.found`."""
        for space in known:
            self._spaces.open(space)
        for path in self._spool.files():
            yield from _batches(self._adopt(path))
        for pages in self._sync.start(SCAN_TIMEOUT_S):
            yield from _batches(pages)

    def _adopt(self, path: Path) -> list[TierPage]:
        """Take in a segment of the spool that an earlier process left."""
        try:
            segment = SegmentFile.open(path, direct=False)
        except OSError as error:
            logger.warning("node %s: %s: left alone", self._settings.node, error.strerror)
            return []
        pages = segment.take_pages() if segment is not None else []
        namespace = self._spaces.namespace_of(pages[0].space) if pages else None
        if (
            segment is None
            or namespace is None
            or segment.number <= self._inventory.tombstones.get(namespace, -1)
        ):
            if segment is not None:
                segment.close()
            path.unlink(missing_ok=True)
            return []
        self._spool.adopt(segment)
        self._index.add_segment(segment)
        valid = [n for n, page in enumerate(pages) if page.space == pages[0].space]
        self._index.insert(segment, valid, newest=True)
        try:
            if not segment.sealed:
                self._spool.seal(segment, namespace)
            else:
                one = SegmentObject(namespace, segment.number, segment.nonce, segment.file_bytes)
                self._sync.upload(segment, one)
        except OSError as error:
            logger.warning("node %s: %s: %s", self._settings.node, path, error.strerror)
        return self._spaces.own_pages([pages[n] for n in valid])

    # --- writing

    def put(self, pages: Sequence[TierPage], data: Sequence[PageMemory]) -> PutResult:
        """See `Tier`."""
        statuses = [STORED] * len(pages)
        places: dict[str, list[int]] = {}
        error = ""
        for place, page in enumerate(pages):
            namespace = self._spaces.open(page.space)
            if not self._fits(page.length_bytes):
                statuses[place] = REFUSED
            elif namespace is not None:
                places.setdefault(namespace, []).append(place)
            elif not self._spaces.is_closed(page.space):  # else it was dropped on its way here
                statuses[place], error = WRITE_FAILED, f"{self._path}: a space without a namespace"
        for namespace, some in places.items():
            for first in range(0, len(some), MAX_BATCH_PAGES):
                batch = some[first : first + MAX_BATCH_PAGES]
                stored = [self._encode(namespace, pages[place], data[place]) for place in batch]
                done, problem = self._put_batch(namespace, stored)
                for place in batch[done:]:
                    statuses[place] = WRITE_FAILED
                error = problem or error
        return PutResult(statuses, error)

    def _encode(self, namespace: str, page: TierPage, memory: PageMemory) -> StoredPage:
        shared = replace(page, space=shared_space(namespace))
        return self._codec.encode(shared, memory, self._settings.facts(page.space))

    def _put_batch(self, namespace: str, stored: Sequence[StoredPage]) -> tuple[int, str]:
        """Append the pages; how many, and what went wrong."""
        done = 0
        try:
            while done < len(stored):
                if not self._spool.has_room_for(namespace, [stored[done].size_bytes]):
                    self._spool.end(namespace)
                    self._make_room()
                    self._index.add_segment(self._spool.begin(namespace))
                segment, ordinals = self._spool.append(namespace, stored[done:])
                self._index.insert(segment, ordinals)
                done += len(ordinals)
        except OSError as error:
            return done, f"{self._path}: {error.strerror or error}"
        return done, ""

    def _fits(self, length_bytes: int) -> bool:
        more_bytes = 0 if self._codec.plain else OVERHEAD_BYTES
        blocks = 1 + record_blocks(length_bytes + more_bytes) + footer_blocks(1)
        return length_bytes <= MAX_PAGE_BYTES and blocks * BLOCK_BYTES <= self._segment_bytes

    def _make_room(self) -> None:
        """Make room for one more segment in spool and bucket. Raises OSError."""
        if not self._spool_has_room():
            oldest = self._spool.oldest()
            if oldest is not None:
                self._spool.end(oldest)
            if not self._sync.wait_for_room(self._spool_has_room, ROOM_TIMEOUT_S):
                raise no_space(f"{self._bucket.url} takes no segments, and the spool is full")
        while self.used_bytes + self._segment_bytes > self.capacity_bytes:
            if not self._drop_oldest():
                raise no_space("the spool fills the capacity")

    def _spool_has_room(self) -> bool:
        return self._inventory.spool_bytes + self._segment_bytes <= self._spool_bytes

    def _drop_oldest(self) -> bool:
        oldest = self._inventory.oldest()
        if oldest is None:
            return False
        segment = self._index.segments.get(oldest.number)
        if isinstance(segment, RemoteSegment) and segment.object == oldest:
            leaving = self._spaces.own_names(self._index.live(segment))
            for first in range(0, len(leaving), SCAN_BATCH_PAGES):
                self._settings.leaving(leaving[first : first + SCAN_BATCH_PAGES])
            self._index.discard(oldest.number)
        self._inventory.remove_soon(oldest)
        self._sync.wake()
        return True

    # --- reading

    def read(self, names: Sequence[PageName], into: Sequence[PageMemory]) -> list[ReadResult]:
        """See `Tier`. Pages that lie side by side in an object come with one request."""
        results = [ReadResult(GONE)] * len(names)
        taken = self._index.pin([self._spaces.shared_name(name) for name in names])
        try:
            for _, group in itertools.groupby(taken, key=lambda one: id(one[3])):
                some = list(group)
                places = [place for _, _, place, _ in some]
                found = self._read_segment(
                    some[0][3],
                    [ordinal for _, ordinal, _, _ in some],
                    [names[place] for place in places],
                    [into[place] for place in places],
                )
                for place, result in zip(places, found, strict=True):
                    results[place] = result
        finally:
            for _, ordinal, place, segment in taken:
                self._index.unpin(segment, ordinal, was_read=results[place].status == LOADED)
        return results

    def _read_segment(
        self,
        segment: SegmentFile | RemoteSegment,
        ordinals: list[int],
        names: list[PageName],
        into: list[PageMemory],
    ) -> list[ReadResult]:
        results = [ReadResult(CORRUPT)] * len(ordinals)
        if isinstance(segment, SegmentFile):
            for place, ordinal in enumerate(ordinals):
                try:
                    stored = segment.read(ordinal, into[place])
                except OSError as error:
                    logger.warning("node %s: %s: %s", self._settings.node, segment.path, error.strerror)
                    results[place] = ReadResult(READ_FAILED)
                    continue
                results[place] = self._decode(stored, names[place], into[place])
            return results
        if segment.absent:
            return [ReadResult(GONE)] * len(ordinals)
        if time.monotonic() < self._reading.retry_at_s:
            return self._not_read(names)
        try:
            for place, stored in read_pages(self._bucket, segment, ordinals, into):
                results[place] = self._decode(stored, names[place], into[place])
        except NoSuchObject:  # somebody made room, or dropped the namespace
            segment.absent = True
            return [ReadResult(GONE)] * len(ordinals)
        except StoreError as error:
            if not self._reading.failures:
                logger.warning("node %s: tier object: cannot read: %s", self._settings.node, error)
            self._reading.failed(time.monotonic())
            return self._not_read(names)
        self._reading.worked()
        return results

    def _decode(self, stored: StoredPage | None, name: PageName, into: PageMemory) -> ReadResult:
        if stored is None:
            return ReadResult(CORRUPT)
        result = self._codec.decode(stored, into, self._settings.facts(name.space))
        return result if result.page is None else ReadResult(LOADED, replace(result.page, space=name.space))

    # --- pages that a store that is away may still have

    def _not_read(self, names: Sequence[PageName]) -> list[ReadResult]:
        with self._unread_lock:
            for name in names:
                if len(self._unread) < MAX_UNREAD:
                    self._unread[name] = None
        return [ReadResult(READ_FAILED)] * len(names)

    def _report_unread(self) -> None:
        """The bucket was listed: those that are still in the index can be asked for again."""
        with self._unread_lock:
            unread, self._unread = list(self._unread), {}
        if unread:
            self._reading.worked()
            held = [self._index.holds(self._spaces.shared_name(name)) for name in unread]
            pages = [
                TierPage(name.space, name.key, name.length_bytes, 0, 0)
                for name, is_held in zip(unread, held, strict=True)
                if is_held
            ]
            for batch in _batches(pages):
                self._settings.found(batch)

    # --- forgetting

    def forget(self, names: Sequence[PageName]) -> None:
        """See `Tier` and `SharedTier`. A page that only could not be read for now stays in the index."""
        with self._unread_lock:
            names = [name for name in names if name not in self._unread]
        self._index.forget([self._spaces.shared_name(name) for name in names])

    def forget_space(self, space: int) -> None:
        """See `Tier`: the namespace's segments up to now are void, here and in the bucket."""
        self._spaces.open(space)  # one that was not opened yet is void as well
        namespace = self._spaces.close(space)
        if namespace is None:
            return
        shared = shared_space(namespace)
        gone = self._inventory.add_tombstone(namespace, self._spool.next_number())
        problem = write_durably(
            self._path / "tombstones.json", msgspec.json.encode(self._inventory.tombstones).decode()
        )
        if problem:
            logger.warning(
                "node %s: tier object: dropped pages may come back: %s", self._settings.node, problem
            )
        self._index.forget_space(shared)
        for number in (self._spool.drop(namespace), *(one.number for one in gone)):
            self._index.discard(number)
        for number, segment in list(self._index.segments.items()):
            if isinstance(segment, SegmentFile) and len(segment) and segment.space(0) == shared:
                self._index.discard(number)
                if self._sync.cancel(number):
                    self._spool.remove(segment)
        self._sync.wake()

    def erase(self, space: int, keys: Collection[bytes] | None = None) -> str:
        """See `Tier`. Objects are removed as a whole, for all nodes: their other pages are lost too."""
        namespace = self._spaces.open(space)
        if keys is None:
            self.forget_space(space)
        elif namespace is not None:
            try:
                self._erase_pages(namespace, keys)
            except OSError as error:
                return f"{self._path}: {error.strerror or error}"
        self._sync.wake()

        def is_done() -> bool:
            return not (self._sync.is_writing or self._inventory.to_remove(1))

        if self._sync.wait_for_room(is_done, ERASE_TIMEOUT_S):
            return ""
        return f"{self._bucket.url} has not removed all objects yet"

    def _erase_pages(self, namespace: str, keys: Collection[bytes]) -> None:
        """Raises OSError."""
        shared = shared_space(namespace)
        self._index.forget_keys(shared, keys)
        for number, segment in list(self._index.segments.items()):
            ordinals = segment.records_of(shared, keys)
            if not ordinals:
                continue
            if isinstance(segment, SegmentFile) and segment is self._spool.current(namespace):
                segment.erase(ordinals)
                continue
            self._settings.lost(self._spaces.own_names(self._index.discard(number)))
            if isinstance(segment, RemoteSegment):
                self._inventory.remove_soon(segment.object)
            elif self._sync.cancel(number):
                self._spool.remove(segment)

    # --- upkeep

    def maintain(self) -> bool:
        """See `Tier`."""
        try:
            for namespace in self._spool.due(self._options.flush_s):
                self._spool.end(namespace)
            self._spool.sync_when_due()
        except OSError as error:
            logger.warning("node %s: %s: %s", self._settings.node, self._path, error.strerror)
        while self.used_bytes > self.capacity_bytes and self._drop_oldest():
            pass  # other nodes have written
        return False

    def close(self) -> None:
        """See `Tier`. What is not uploaded in a moment stays in the spool."""
        if self._closed:
            return
        self._closed = True
        try:
            self._spool.end_all()
        except OSError as error:
            logger.warning("node %s: %s: %s", self._settings.node, self._path, error.strerror)
        self._sync.stop(CLOSE_TIMEOUT_S)
        self._index.close()
        os.close(self._lock_fd)


def _sizes(settings: TierSettings, options: ObjectOptions) -> tuple[int, int]:
    """Bytes of a segment and of the spool. Raises ConfigError, StartupError."""
    segment_bytes = segment_bytes_of(settings, "object", options.segment_bytes)
    where = f"node {settings.node}: tier object at {settings.path}"
    try:
        spool_bytes = parse_bytes(options.spool_bytes)
    except ValueError as error:
        raise ConfigError(f"{where}: spool_bytes: {error}") from error
    if spool_bytes < MIN_SPOOL_SEGMENTS * segment_bytes or spool_bytes > settings.capacity_bytes:
        raise ConfigError(
            f"{where}: spool_bytes must be between {MIN_SPOOL_SEGMENTS} segments ({segment_bytes} bytes) and "
            f"capacity_bytes, it is {spool_bytes}"
        )
    return segment_bytes, spool_bytes


def _bucket(settings: TierSettings, options: ObjectOptions) -> Bucket:
    """Raises ConfigError."""
    given = {"endpoint": options.endpoint, "region": options.region}
    try:
        return Bucket(
            options.url,
            {name: value for name, value in given.items() if value},
            anonymous=options.anonymous,
            read_timeout_s=options.read_timeout_s,
            timeout_s=options.timeout_s,
        )
    except ConfigError as error:
        raise ConfigError(f"node {settings.node}: tier object at {settings.path}: {error}") from None


def _batches(pages: list[TierPage]) -> Iterator[list[TierPage]]:
    for first in range(0, len(pages), SCAN_BATCH_PAGES):
        yield pages[first : first + SCAN_BATCH_PAGES]
