"""An eviction policy: pages that were read at least once outlive pages that nobody has read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from pdserve.kvpool.policies.base import Links, Slots, Times

UNREAD, READ = 0, 1


class ReadOnce:
    """An `EvictionPolicy` of two lists. The word of a slot says which list the slot is in."""

    def __init__(self, links: Links) -> None:
        self._lists = links.new_list(), links.new_list()
        self._words = links.words  # shared by all policies of a node; a slot is in one policy

    def on_insert(self, slot: int, key: bytes, now_s: float) -> None:
        """A new page: nobody has read it."""
        self._words[slot] = UNREAD
        self._lists[UNREAD].append(slot)

    def on_hit(self, slot: int, now_s: float) -> None:
        """The page moves to the end of the read pages."""
        self._lists[self._words[slot]].remove(slot)
        self._words[slot] = READ
        self._lists[READ].append(slot)

    def on_demote(self, slot: int) -> None:
        """The page is the first of the unread pages."""
        self._lists[self._words[slot]].remove(slot)
        self._words[slot] = UNREAD
        self._lists[UNREAD].prepend(slot)

    def on_evict(self, slot: int, key: bytes) -> None:
        """Forget the slot."""
        self._lists[self._words[slot]].remove(slot)

    def on_remove(self, slot: int) -> None:
        """Forget the slot."""
        self._lists[self._words[slot]].remove(slot)

    def victims(self) -> Iterator[int]:
        """Unread pages first, oldest first; then read pages, the longest unused first."""
        return chain(self._lists[UNREAD], self._lists[READ])

    def restore(self, slots: Slots, inserted_s: Times) -> None:
        """After a restart nothing is known of reads. Vectorised: a node may hold millions of pages."""
        found = np.asarray(slots, dtype=np.int32)
        np.frombuffer(self._words, dtype=np.uint32)[found] = UNREAD
        self._lists[UNREAD].extend(found)

    def close(self) -> None:
        """Nothing is remembered of pages that are gone."""

    def __len__(self) -> int:
        return len(self._lists[UNREAD]) + len(self._lists[READ])
