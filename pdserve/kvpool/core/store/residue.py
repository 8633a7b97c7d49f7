"""Whose bytes may still lie in each slot, also in a free one. Pure.

A page that is gone leaves its bytes where they were. The next writer of its slot may send fewer than it
reserved, or none, and commit all the same; so a slot with bytes of another namespace is wiped before its
grant is known. Bytes of the same namespace stay: whoever may read the new page could read the old one.

A slab that gets another class has its bytes in other slots. They are one namespace's if all its slots were;
else nobody's in particular, and every one is wiped at its next use. So it is with all that a restart did not
keep. The memory of a fresh arena is zero: its first filling costs nothing.
"""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np
import numpy.typing as npt

from pdserve.kvpool.core.store.slot_allocator import SlotAllocator

NOBODY: Final = 0  # zeros
UNKNOWN: Final = (1 << 32) - 1


class Residue:
    """Of every slot of an allocator: the number of a namespace, NOBODY or UNKNOWN."""

    def __init__(self, slots: SlotAllocator) -> None:
        self._slots = slots
        self._of = array("I", bytes(4 * slots.slots))
        self._around = array("I", bytes(4 * slots.slabs))  # of a slab's bytes that its class has in no slot
        self._class = array("Q", bytes(8 * slots.slabs))  # that `_of` is by; a slab keeps it when unassigned

    def assigned(self, slab: int) -> None:
        """The slab, of free slots all, has got its class."""
        slot_bytes = self._slots.slab_class[slab]
        if self._class[slab] == slot_bytes:
            return
        start = slab * self._slots.slots_per_slab
        mine = np.frombuffer(self._of, np.uint32)[start : start + self._slots.slots_per_slab]
        owners = {*mine.tolist(), self._around[slab]} - {NOBODY}  # np.unique loads 1.4 MB first, for 8 ms
        mine[:] = self._around[slab] = NOBODY if not owners else owners.pop() if len(owners) == 1 else UNKNOWN
        self._class[slab] = slot_bytes

    def take(self, slots: list[int], namespace: int) -> list[tuple[int, int]]:
        """A namespace gets these slots; the bytes of the arena, each from and to, to be wiped before."""
        wipe, of = [], self._of
        for slot in [slot for slot in slots if of[slot] != namespace]:
            if of[slot] != NOBODY:
                start = self._slots.offset(slot)
                wipe.append((start, start + self._slots.slot_bytes(slot)))
            of[slot] = namespace
        return wipe

    def restore(self, slots: npt.NDArray[np.int64], namespaces: npt.NDArray[np.uint32]) -> None:
        """After a restart: the slots of the pages that were kept, and whose they are."""
        of = np.frombuffer(self._of, np.uint32)
        of[:] = UNKNOWN
        of[slots] = namespaces
        np.frombuffer(self._around, np.uint32)[:] = UNKNOWN
        self._class[:] = self._slots.slab_class
