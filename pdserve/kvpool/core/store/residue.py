"""The namespace whose bytes are still in each slot, including free slots. Pure.

A removed page leaves its bytes in the slot. The next writer may send fewer bytes than it reserved, or none,
and still commit. So a slot with bytes of another namespace is wiped before the writer knows its grant. Bytes
of the same namespace stay: a client that may read the new page could read the old one too.

When a slab gets another class, its bytes lie in other slots. If all its slots had bytes of one namespace, the
new slots have too. Otherwise the bytes are UNKNOWN, and each slot is wiped at its next use. The same holds
for all slots that a restart did not keep. The memory of a new arena is zero: its first use costs nothing.
"""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np
import numpy.typing as npt

from pdserve.kvpool.core.store.slot_allocator import SlotAllocator

NOBODY: Final = 0  # the slot is zero
UNKNOWN: Final = (1 << 32) - 1


class Residue:
    """For each slot: the number of a namespace, NOBODY or UNKNOWN."""

    def __init__(self, slots: SlotAllocator) -> None:
        self._slots = slots
        self._of = array("I", bytes(4 * slots.slots))
        self._around = array("I", bytes(4 * slots.slabs))  # of the slab's bytes outside its slots
        self._class = array(
            "Q", bytes(8 * slots.slabs)
        )  # the slab's class when `_of` was set; kept when it is unassigned

    def assigned(self, slab: int) -> None:
        """A class was given to a slab; all its slots are free."""
        slot_bytes = self._slots.slab_class[slab]
        if self._class[slab] == slot_bytes:
            return
        start = slab * self._slots.slots_per_slab
        mine = np.frombuffer(self._of, np.uint32)[start : start + self._slots.slots_per_slab]
        owners = {*mine.tolist(), self._around[slab]} - {NOBODY}  # np.unique loads 1.4 MB first, for 8 ms
        mine[:] = self._around[slab] = NOBODY if not owners else owners.pop() if len(owners) == 1 else UNKNOWN
        self._class[slab] = slot_bytes

    def take(self, slots: list[int], namespace: int) -> list[tuple[int, int]]:
        """A namespace gets these slots; the byte ranges of the arena to wipe before, half-open."""
        wipe, of = [], self._of
        for slot in [slot for slot in slots if of[slot] != namespace]:
            if of[slot] != NOBODY:
                start = self._slots.offset(slot)
                wipe.append((start, start + self._slots.slot_bytes(slot)))
            of[slot] = namespace
        return wipe

    def wiped(self, slot: int) -> None:
        """The bytes of a slot were set to zero."""
        self._of[slot] = NOBODY

    def restore(self, slots: npt.NDArray[np.int64], namespaces: npt.NDArray[np.uint32]) -> None:
        """After a restart: the slots of the pages kept, and their namespaces."""
        of = np.frombuffer(self._of, np.uint32)
        of[:] = UNKNOWN
        of[slots] = namespaces
        np.frombuffer(self._around, np.uint32)[:] = UNKNOWN
        self._class[:] = self._slots.slab_class
