"""Pages that were dropped all at once, and whose slots are freed little by little. Pure.

To clear a namespace of a million pages, its index and orders of eviction are taken away whole, and the states
of its slots become SWEEPING in one vectorised look: from then on nobody finds a page of it. What was taken
away is a `Sweep`. Its bytes count as free, for whoever needs room sweeps first. Nobody holds any of its
slots: held pages are dropped one by one before.

Their rows in the slot table stand until they are swept. After a crash in between they belong to nobody: they
carry the number that the namespace's rows had before it was cleared.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from pdserve.kvpool.policies.base import EvictionPolicy

CHUNK_SLOTS: Final = 1024  # freed at a time: about 2 ms


class Sweep:
    """What one clear left to do."""

    def __init__(self, slot_of: dict[bytes, int], orders: dict[int, EvictionPolicy]) -> None:
        self.slot_of = slot_of
        self.orders = orders  # by size class
        for order in orders.values():
            order.close()

    def take(self, slot_bytes: int | None) -> tuple[int, list[int]]:
        """Up to CHUNK_SLOTS slots and their size; of the given class, or of any. They are to be freed."""
        for size in list(self.orders) if slot_bytes is None else [slot_bytes]:
            order = self.orders.get(size)
            if order is None:
                continue
            slots = list(islice(order.victims(), CHUNK_SLOTS))
            for slot in slots:
                order.on_remove(slot)
            if not len(order):
                del self.orders[size]
            if slots:
                return size, slots
        return 0, []

    @property
    def bytes_left(self) -> int:
        return sum(size * len(order) for size, order in self.orders.items())
