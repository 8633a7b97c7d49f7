"""What is in the bucket and in the spool, as far as this node knows. Pure, but for a lock.

The capacity is that of the bucket's prefix: all nodes of a pool count all segments in it, and whoever needs
room removes the oldest, whoever wrote it. Two nodes that need room at a time choose the same one, and
removing it twice does no harm. A node that still lists it has a miss. Between two listings each node may
write segments that the others do not count yet.

A segment that is to be removed does not count any more; it is removed before anything else is written.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from pdserve.kvpool.tiers.object.names import SegmentObject

MAX_VOIDS: Final = 4096  # namespaces that were dropped or cleared; the oldest are forgotten


class Inventory:
    """Thread-safe. `voids`: by namespace, the number up to which its segments are void."""

    def __init__(self, voids: dict[str, int]) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, SegmentObject] = {}  # by name
        self._absent: set[str] = set()  # names that the last listing had not
        self._doomed: dict[str, SegmentObject] = {}
        self._object_bytes = 0
        self._spool_bytes = 0
        self.voids = voids

    @property
    def used_bytes(self) -> int:
        """In bucket and spool."""
        return self._object_bytes + self._spool_bytes

    @property
    def spool_bytes(self) -> int:
        return self._spool_bytes

    def spool(self, change_bytes: int) -> None:
        """The spool has so many bytes more or less."""
        with self._lock:
            self._spool_bytes += change_bytes

    def uploaded(self, one: SegmentObject) -> None:
        """A segment of the spool is in the bucket now."""
        with self._lock:
            self._spool_bytes -= one.size_bytes
            self._add(one)

    def has(self, one: SegmentObject) -> bool:
        with self._lock:
            return self._objects.get(one.name) == one

    def objects(self, namespaces: set[str]) -> list[SegmentObject]:
        """The segments of these namespaces, oldest first."""
        with self._lock:
            found = [one for one in self._objects.values() if one.namespace in namespaces]
        return sorted(found, key=lambda one: one.number)

    # --- what is to be removed

    def doom(self, one: SegmentObject) -> None:
        """Remove it soon."""
        with self._lock:
            self._doom(one)

    def doom_oldest(self) -> SegmentObject | None:
        """Remove the oldest segment soon. None: there is none."""
        with self._lock:
            oldest = min(self._objects.values(), key=lambda one: (one.number, one.name), default=None)
            if oldest is not None:
                self._doom(oldest)
        return oldest

    def oldest(self) -> SegmentObject | None:
        with self._lock:
            return min(self._objects.values(), key=lambda one: (one.number, one.name), default=None)

    def void(self, namespace: str, number: int) -> list[SegmentObject]:
        """Segments of the namespace up to this number are void for ever. Returns those that there are."""
        with self._lock:
            self.voids.pop(namespace, None)
            self.voids[namespace] = number
            while len(self.voids) > MAX_VOIDS:
                del self.voids[next(iter(self.voids))]
            found = [one for one in self._objects.values() if one.namespace == namespace]
            gone = [one for one in found if one.number <= number]
            for one in gone:
                self._doom(one)
        return gone

    def is_void(self, one: SegmentObject) -> bool:
        return one.number <= self.voids.get(one.namespace, -1)

    def doomed(self, most: int) -> list[SegmentObject]:
        with self._lock:
            return list(self._doomed.values())[:most]

    def removed(self, gone: Sequence[SegmentObject]) -> None:
        """They are not in the bucket any more."""
        with self._lock:
            for one in gone:
                self._doomed.pop(one.name, None)

    # --- listings

    def listed(self, found: Sequence[SegmentObject]) -> list[SegmentObject]:
        """Take in a complete listing. Returns segments that somebody removed.

        One that is missing for the first time may only be too new for this store's listing.
        """
        with self._lock:
            names = {one.name for one in found}
            for one in found:
                if one.name not in self._doomed and one.name not in self._objects:
                    self._add(one)
                    if self.is_void(one):
                        self._doom(one)
            missing = self._objects.keys() - names
            lost = [self._objects[name] for name in missing & self._absent]
            for one in lost:
                self._drop(one)
            self._absent = missing - {one.name for one in lost}
        return lost

    def _add(self, one: SegmentObject) -> None:
        if one.name not in self._objects:
            self._objects[one.name] = one
            self._object_bytes += one.size_bytes

    def _drop(self, one: SegmentObject) -> None:
        if self._objects.pop(one.name, None) is not None:
            self._object_bytes -= one.size_bytes

    def _doom(self, one: SegmentObject) -> None:
        self._drop(one)
        self._doomed[one.name] = one
