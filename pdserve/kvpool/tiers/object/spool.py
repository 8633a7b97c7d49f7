"""Segments on the local disk that are not in the bucket yet: one is being written for each namespace.

    <path>/<number>.seg    as in the SSD tier; its records have the space that all nodes know

A page is on the local disk when its put ends, so a killed process loses none. The spool is bounded: where the
bucket is slower than the writers, or away, puts fail until there is room again.
"""

from __future__ import annotations

import errno
import mmap
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from pdserve.kvpool.tiers.object.inventory import NUMBER_RANDOM_BITS, Inventory, SegmentObject, new_number
from pdserve.kvpool.tiers.page_codec import StoredPage
from pdserve.kvpool.tiers.ssd.segment_file import SegmentFile, segment_name
from pdserve.kvpool.tiers.ssd.segment_format import BLOCK_BYTES, SegmentHeader
from pdserve.kvpool.tiers.ssd.segment_index import MAX_BATCH_PAGES

SYNC_INTERVAL_S: Final = 1.0


class Spool:
    """Used by the writer's thread. `sealed(file, namespace)` takes a segment that is complete."""

    def __init__(
        self,
        path: Path,
        segment_bytes: int,
        inventory: Inventory,
        sealed: Callable[[SegmentFile, SegmentObject], None],
    ) -> None:
        self._path = path
        self._segment_bytes = segment_bytes
        self._inventory = inventory
        self._sealed = sealed
        self._open: dict[str, tuple[SegmentFile, float]] = {}  # by namespace: segment, and its beginning
        self._last_number = 0
        self._unsynced_since_s: float | None = None
        self._headers = mmap.mmap(-1, MAX_BATCH_PAGES * BLOCK_BYTES)

    def next_number(self) -> int:
        """A number above all that were given out before."""
        self._last_number = new_number(time.time(), secrets.randbits(NUMBER_RANDOM_BITS), self._last_number)
        return self._last_number

    def files(self) -> list[Path]:
        """What an earlier process left, oldest first."""
        found = [path for path in self._path.glob("*.seg") if path.stem.isdecimal()]
        return sorted(found, key=lambda path: int(path.stem))

    def adopt(self, segment: SegmentFile) -> None:
        """A segment of an earlier process: numbers go on above it, and its bytes count."""
        self._last_number = max(self._last_number, segment.number)
        self._inventory.spool(segment.file_bytes)

    def has_room_for(self, namespace: str, sizes: Sequence[int]) -> bool:
        """Whether the next page fits into the segment that is being written."""
        current = self._open.get(namespace)
        return current is not None and current[0].fits(sizes[:1]) > 0

    def current(self, namespace: str) -> SegmentFile | None:
        """The segment that is being written."""
        return self._open[namespace][0] if namespace in self._open else None

    def begin(self, namespace: str) -> SegmentFile:
        """Begin a segment in place of the one that is being written. Raises OSError."""
        self.end(namespace)
        number = self.next_number()
        header = SegmentHeader(number, secrets.randbits(64))
        path = self._path / segment_name(number)
        segment = SegmentFile.create(path, header, self._segment_bytes, direct=False)
        self._inventory.spool(segment.file_bytes)
        self._open[namespace] = segment, time.monotonic()
        return segment

    def append(self, namespace: str, stored: Sequence[StoredPage]) -> tuple[SegmentFile, range]:
        """Append as many of these pages as fit. Returns where they are. Raises OSError."""
        segment, _ = self._open[namespace]
        fitting = segment.fits([one.size_bytes for one in stored])
        first = segment.append(stored[:fitting], self._headers)
        if self._unsynced_since_s is None:
            self._unsynced_since_s = time.monotonic()
        return segment, range(first, first + fitting)

    def seal(self, segment: SegmentFile, namespace: str) -> None:
        """Complete a segment and pass it on. Raises OSError; then it stays for the next start."""
        before = segment.file_bytes
        segment.seal()
        self._inventory.spool(segment.file_bytes - before)
        self._sealed(segment, SegmentObject(namespace, segment.number, segment.nonce, segment.file_bytes))

    def end(self, namespace: str) -> None:
        """Complete the segment that is being written, if there is one. Raises OSError."""
        current = self._open.pop(namespace, None)
        if current is not None:
            self.seal(current[0], namespace)

    def drop(self, namespace: str) -> int:
        """Forget the segment that is being written; its number, 0 if there is none."""
        current = self._open.pop(namespace, None)
        if current is None:
            return 0
        self.remove(current[0])
        return current[0].number

    def remove(self, segment: SegmentFile) -> None:
        """It is not to be uploaded."""
        self._inventory.spool(-segment.file_bytes)
        segment.remove()

    def oldest(self) -> str | None:
        """The namespace whose segment was begun first."""
        return min(self._open, key=lambda namespace: self._open[namespace][1], default=None)

    def due(self, flush_s: float) -> Iterator[str]:
        """Namespaces whose segment was begun so long ago."""
        now_s = time.monotonic()
        return iter([name for name, (_, since_s) in self._open.items() if now_s - since_s >= flush_s])

    def sync_when_due(self) -> None:
        """Make what was written durable, once a second. Raises OSError."""
        if self._unsynced_since_s is None or time.monotonic() < self._unsynced_since_s + SYNC_INTERVAL_S:
            return
        self._unsynced_since_s = None
        for segment, _ in self._open.values():
            segment.sync()

    def end_all(self) -> None:
        """Complete all segments. Raises OSError."""
        for namespace in list(self._open):
            self.end(namespace)


def no_space(message: str) -> OSError:
    """The spool or the bucket has no room."""
    return OSError(errno.ENOSPC, message)
