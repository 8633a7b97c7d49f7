"""Time to live: evict the page that ends first, and say which have ended.

A page ends `ttl_s` after its commit, read or not. As all pages of a policy live equally long, their order of
ending is that of their commits: a list whose head ends first, so that nothing is ever searched.

The store also keeps one of these beside any other policy of a namespace whose pages are to end.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pdserve.kvpool.policies.base import NONE, Links, Slots, Times
from pdserve.kvpool.policies.fifo import Fifo


class Ttl(Fifo):
    """An EvictionPolicy; 8 bytes per page beside the links."""

    def __init__(self, links: Links, ttl_s: float) -> None:
        super().__init__(links)
        self.ttl_s = ttl_s
        self._end_s = links.times_s

    def on_insert(self, slot: int, key: bytes, now_s: float) -> None:
        self._end_s[slot] = now_s + self.ttl_s
        self._order.append(slot)

    def has_ended(self, slot: int, now_s: float) -> bool:
        """Whether the slot's page, which this policy holds, is past its time."""
        return self._end_s[slot] <= now_s

    def ended(self, now_s: float) -> Iterator[int]:
        """Those past their time, the first to end first. The iterator ends with the first change."""
        for slot in self._order:
            if self._end_s[slot] > now_s:
                return
            yield slot

    @property
    def next_end_s(self) -> float:
        """When the next page ends; infinite when there is none."""
        head = self._order.head
        return float("inf") if head == NONE else self._end_s[head]

    def restore(self, slots: Slots, inserted_s: Times) -> None:
        super().restore(slots, inserted_s)
        np.frombuffer(self._end_s)[np.asarray(slots, dtype=np.int64)] = inserted_s + self.ttl_s
