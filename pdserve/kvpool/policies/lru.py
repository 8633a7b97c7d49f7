"""Least recently used: evict the page whose last read or write is the oldest. First in, first out: evict the
page that was committed first; being read does not help it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pdserve.kvpool.policies.base import Links, Slots, Times


class Lru:
    """An EvictionPolicy; a linked list in order of last use. No memory beside the links."""

    def __init__(self, links: Links) -> None:
        self._order = links.new_list()

    def on_insert(self, slot: int, key: bytes, now_s: float) -> None:
        self._order.append(slot)

    def on_hit(self, slot: int, now_s: float) -> None:
        self._order.move_to_end(slot)

    def on_demote(self, slot: int) -> None:
        self._order.remove(slot)
        self._order.prepend(slot)

    def on_evict(self, slot: int, key: bytes) -> None:
        self._order.remove(slot)

    def on_remove(self, slot: int) -> None:
        self._order.remove(slot)

    def victims(self) -> Iterator[int]:
        return iter(self._order)

    def restore(self, slots: Slots, inserted_s: Times) -> None:
        self._order.extend(np.asarray(slots, dtype=np.int32))

    def close(self) -> None:
        pass

    def __len__(self) -> int:
        return len(self._order)


class Fifo(Lru):
    """An EvictionPolicy; a linked list in order of commit. No memory beside the links."""

    def on_hit(self, slot: int, now_s: float) -> None:
        pass
