"""Names of objects, and what is in bucket and spool as far as this node knows. Pure, but for a lock.

    pages/<namespace>/<number>-<nonce>.seg    a sealed segment; all of its pages are of one namespace

`namespace` is `SpaceFacts.shared`, 32 hexadecimal digits. Number and nonce are those of the segment's header,
16 hexadecimal digits each. A number is the time of the segment's beginning and some random bits, so names
sort by age, and nodes need not agree on numbers. The records of a segment have a space that all nodes know:
the first 16 digits of the namespace as a number.

The capacity is that of the bucket's prefix: all nodes of a pool count all segments in it, and whoever needs
room removes the oldest, whoever wrote it. Two nodes that need room at a time choose the same one, and
removing it twice does no harm. A node that still lists it has a miss. Between two listings each node may
write segments that the others do not count yet.

A segment that is to be removed does not count any more; it is removed before anything else is written.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from pdserve.kvpool.tiers.base import PageName, SpaceFacts, TierPage
from pdserve.kvpool.tiers.ssd.segment_format import BLOCK_BYTES, MAX_NUMBER, MAX_SEGMENT_BYTES

MAX_TOMBSTONES: Final = 4096  # namespaces that were dropped or cleared; the oldest are forgotten
PREFIX: Final = "pages/"
NUMBER_RANDOM_BITS: Final = 20
MIN_SEGMENT_BYTES: Final = 5 * BLOCK_BYTES  # header, a record of two blocks, footer, trailer
_NAME: Final = re.compile(r"pages/([0-9a-f]{32})/([0-9a-f]{16})-([0-9a-f]{16})\.seg")


class SegmentObject(msgspec.Struct, frozen=True, gc=False):
    """A segment in the bucket, as a listing shows it."""

    namespace: str
    number: int
    nonce: int
    size_bytes: int

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.namespace}/{self.number:016x}-{self.nonce:016x}.seg"

    @property
    def space(self) -> int:
        """The space of its records."""
        return shared_space(self.namespace)


def parse_object(name: str, size_bytes: int) -> SegmentObject | None:
    """None: the object has not the name and size of a segment."""
    found = _NAME.fullmatch(name)
    if found is None or not MIN_SEGMENT_BYTES <= size_bytes <= MAX_SEGMENT_BYTES or size_bytes % BLOCK_BYTES:
        return None
    number = int(found[2], 16)
    if number >= MAX_NUMBER:
        return None
    return SegmentObject(found[1], number, int(found[3], 16), size_bytes)


def shared_space(namespace: str) -> int:
    """The space of a namespace's pages at all nodes."""
    return int(namespace[:16], 16)


def new_number(now_s: float, random: int, last: int) -> int:
    """A number for a segment that begins now, above `last`. `random`: NUMBER_RANDOM_BITS bits."""
    return max(int(now_s * 1000) << NUMBER_RANDOM_BITS | random, last + 1)


class Inventory:
    """Thread-safe. `tombstones`: by namespace, the number up to which its segments are void."""

    def __init__(self, tombstones: dict[str, int]) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, SegmentObject] = {}  # by name
        self._absent: set[str] = set()  # names that the last listing had not
        self._to_remove: dict[str, SegmentObject] = {}
        self._object_bytes = 0
        self._spool_bytes = 0
        self.tombstones = tombstones

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

    def remove_soon(self, one: SegmentObject) -> None:
        """Remove it soon."""
        with self._lock:
            self._remove_soon(one)

    def oldest(self) -> SegmentObject | None:
        with self._lock:
            return min(self._objects.values(), key=lambda one: (one.number, one.name), default=None)

    def add_tombstone(self, namespace: str, number: int) -> list[SegmentObject]:
        """Segments of the namespace up to this number are void for ever. Returns those that there are."""
        with self._lock:
            self.tombstones.pop(namespace, None)
            self.tombstones[namespace] = number
            while len(self.tombstones) > MAX_TOMBSTONES:
                del self.tombstones[next(iter(self.tombstones))]
            found = [one for one in self._objects.values() if one.namespace == namespace]
            gone = [one for one in found if one.number <= number]
            for one in gone:
                self._remove_soon(one)
        return gone

    def is_dropped(self, one: SegmentObject) -> bool:
        return one.number <= self.tombstones.get(one.namespace, -1)

    def to_remove(self, most: int) -> list[SegmentObject]:
        with self._lock:
            return list(self._to_remove.values())[:most]

    def removed(self, gone: Sequence[SegmentObject]) -> None:
        """They are not in the bucket any more."""
        with self._lock:
            for one in gone:
                self._to_remove.pop(one.name, None)

    # --- listings

    def listed(self, found: Sequence[SegmentObject]) -> list[SegmentObject]:
        """Take in a complete listing. Returns segments that somebody removed.

        One that is missing for the first time may only be too new for this store's listing.
        """
        with self._lock:
            names = {one.name for one in found}
            for one in found:
                if one.name not in self._to_remove and one.name not in self._objects:
                    self._add(one)
                    if self.is_dropped(one):
                        self._remove_soon(one)
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

    def _remove_soon(self, one: SegmentObject) -> None:
        self._drop(one)
        self._to_remove[one.name] = one


NO_SPACE = -1


class OpenSpaces:
    """The spaces of this node whose namespaces are known, and the space of the same pages at all nodes.
    Thread-safe. `facts`: see `TierSettings`.
    """

    def __init__(self, facts: Callable[[int], SpaceFacts | None]) -> None:
        self._facts = facts
        self._lock = threading.Lock()
        self._namespaces: dict[int, str] = {}  # by space of this node
        self._spaces: dict[int, int] = {}  # by shared space
        self._closed: set[int] = set()

    def open(self, space: int, *, again: bool = False) -> str | None:
        """The namespace (`SpaceFacts.shared`); None: nothing is known of the space, or it was closed.

        `again`: also one that was closed.
        """
        with self._lock:
            if again:
                self._closed.discard(space)
            namespace = self._namespaces.get(space)
            known = namespace is not None or space in self._closed
            facts = None if known else self._facts(space)
            if facts is not None:
                namespace = self._namespaces[space] = facts.shared
                self._spaces[shared_space(namespace)] = space
        return namespace

    def close(self, space: int) -> str | None:
        """Forget the space; its namespace, or None."""
        with self._lock:
            self._closed.add(space)
            namespace = self._namespaces.pop(space, None)
            if namespace is not None and self._spaces.get(shared_space(namespace)) == space:
                del self._spaces[shared_space(namespace)]
        return namespace

    def is_closed(self, space: int) -> bool:
        """Whether its namespace was dropped or cleared: nobody asks for its pages any more."""
        return space in self._closed

    def namespaces(self) -> set[str]:
        with self._lock:
            return set(self._namespaces.values())

    def namespace_of(self, shared: int) -> str | None:
        """The open namespace with this shared space."""
        with self._lock:
            return self._namespaces.get(self._spaces.get(shared, NO_SPACE))

    def shared_name(self, name: PageName) -> PageName:
        """The name at all nodes; one that no page has, for an unknown space."""
        namespace = self._namespaces.get(name.space)
        return replace(name, space=NO_SPACE if namespace is None else shared_space(namespace))

    def own_names(self, names: Sequence[PageName]) -> list[PageName]:
        """The names at this node, without those of spaces that are closed."""
        with self._lock:
            return [
                replace(name, space=self._spaces[name.space]) for name in names if name.space in self._spaces
            ]

    def own_pages(self, pages: Sequence[TierPage]) -> list[TierPage]:
        """The pages as this node names them, without those of spaces that are closed."""
        with self._lock:
            return [
                replace(page, space=self._spaces[page.space]) for page in pages if page.space in self._spaces
            ]
