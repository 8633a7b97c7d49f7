"""Time to live: evict the page that expires first, and say which have expired.

A page expires `ttl_s` after its commit, read or not. All pages of a policy live equally long, so they expire
in the order of their commits: a list whose head expires first. A page from another node has lived there for a
part of its time. If it expires before the end of the list, it is in a sorted list beside it.

The store keeps one of these beside another policy, where a namespace has a time to live.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import merge

import numpy as np

from pdserve.kvpool.policies.base import NONE, Links, Slots, Times
from pdserve.kvpool.policies.lru import Fifo


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

    def on_demote(self, slot: int) -> None:
        pass

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
        """Whether the slot's page has expired. The policy must hold the slot."""
        return self._end_s[slot] <= now_s

    def ended(self, now_s: float) -> Iterator[int]:
        """The expired slots, the first to expire first. A change of the policy ends the iterator."""
        for slot in self.victims():
            if self._end_s[slot] > now_s:
                return
            yield slot

    @property
    def next_end_s(self) -> float:
        """When the next page expires; infinite when there is none."""
        head = self._order.head
        end_s = float("inf") if head == NONE else self._end_s[head]
        return min(end_s, self._early[0][0]) if self._early else end_s

    def restore(self, slots: Slots, inserted_s: Times) -> None:
        super().restore(slots, inserted_s)
        np.frombuffer(self._end_s)[np.asarray(slots, dtype=np.int64)] = inserted_s + self.ttl_s
