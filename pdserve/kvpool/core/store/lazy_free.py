"""Pages that were dropped together, and whose slots are freed little by little. Pure.

To clear a namespace of a million pages, the store takes away its index and its orders of eviction as a whole,
and one vectorised step makes the states of its slots SWEEPING. From then on no lookup finds a page of it. A
`Sweep` has what was taken away. Its bytes count as free: a reservation that needs room sweeps first. No
reader holds any of its slots: held pages are dropped one by one before.

Rows of the slot table stay COMMITTED until they are swept. After a crash in between they are void: they carry
the space that the namespace had before the clear.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from pdserve.kvpool.policies.base import EvictionPolicy

CHUNK_SLOTS: Final = 1024  # freed at a time: about 2 ms
ERASED_BYTES: Final = 16 << 20  # set to zero at a time: about 2 ms


class Sweep:
    """What one clear has left to do."""

    def __init__(
        self, slot_of: dict[bytes, int], orders: dict[int, EvictionPolicy], *, erases: bool = False
    ) -> None:
        """`erases`: the slots' bytes are set to zero, which takes longer."""
        self._erases = erases
        self.slot_of = slot_of
        self.orders = orders  # by size class
        for order in orders.values():
            order.close()

    def take(self, slot_bytes: int | None) -> tuple[int, list[int]]:
        """Take out some slots of one class, CHUNK_SLOTS at most, and their size. The class is given, or
        any.
        """
        for size in list(self.orders) if slot_bytes is None else [slot_bytes]:
            order = self.orders.get(size)
            if order is None:
                continue
            most = max(1, min(CHUNK_SLOTS, ERASED_BYTES // size)) if self._erases else CHUNK_SLOTS
            slots = list(islice(order.victims(), most))
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
