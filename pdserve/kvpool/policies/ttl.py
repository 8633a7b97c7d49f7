"""Time to live: evict the page that ends first, and say which have ended.

A page ends `ttl_s` after its commit, read or not. As all pages of a policy live equally long, their order of
ending is that of their commits: a list whose head ends first, so that nothing is ever searched. Pages that
another node had before have lived there for a part of their time; those that end before the list's last are
in a sorted one beside it.

The store also keeps one of these beside any other policy of a namespace whose pages are to end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import merge

import numpy as np

from pdserve.kvpool.policies.base import NONE, Links, Slots, Times
from pdserve.kvpool.policies.fifo import Fifo


class Ttl(Fifo):
    """An EvictionPolicy; 8 bytes per page beside the links."""

    def __init__(self, links: Links, ttl_s: float) -> None:
        super().__init__(links)
        self.ttl_s = ttl_s
        self._end_s = links.times_s
        self._early: list[tuple[float, int]] = []  # end, slot; ascending

    def on_insert(self, slot: int, key: bytes, now_s: float) -> None:
        end_s = self._end_s[slot] = now_s + self.ttl_s
        if len(self._order) and end_s < self._end_s[self._order.tail]:
            insort(self._early, (end_s, slot))
        else:
            self._order.append(slot)

    def on_evict(self, slot: int, key: bytes) -> None:
        self.on_remove(slot)

    def on_remove(self, slot: int) -> None:
        entry = self._end_s[slot], slot
        place = bisect_left(self._early, entry)
        if place < len(self._early) and self._early[place] == entry:
            del self._early[place]
        else:
            self._order.remove(slot)

    def victims(self) -> Iterator[int]:
        if not self._early:
            return iter(self._order)
        return merge((slot for _, slot in self._early), self._order, key=self._end_s.__getitem__)

    def __len__(self) -> int:
        return len(self._order) + len(self._early)

    def has_ended(self, slot: int, now_s: float) -> bool:
        """Whether the slot's page, which this policy holds, is past its time."""
        return self._end_s[slot] <= now_s

    def ended(self, now_s: float) -> Iterator[int]:
        """Those past their time, the first to end first. The iterator ends with the first change."""
        for slot in self.victims():
            if self._end_s[slot] > now_s:
                return
            yield slot

    @property
    def next_end_s(self) -> float:
        """When the next page ends; infinite when there is none."""
        head = self._order.head
        end_s = float("inf") if head == NONE else self._end_s[head]
        return min(end_s, self._early[0][0]) if self._early else end_s

    def restore(self, slots: Slots, inserted_s: Times) -> None:
        super().restore(slots, inserted_s)
        np.frombuffer(self._end_s)[np.asarray(slots, dtype=np.int64)] = inserted_s + self.ttl_s
