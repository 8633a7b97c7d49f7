"""The last use of each slab: size classes share the arena by recency. Pure; O(1)."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pdserve.kvpool.core.store.index import NONE
from pdserve.kvpool.core.store.slot_allocator import SlotAllocator


class SlabUse:
    """The slabs of each size class, coldest first, each with its last use by the store's counter of uses."""

    def __init__(self, slots: SlotAllocator) -> None:
        self._slots = slots
        self._of_class: dict[int, OrderedDict[int, int]] = {}
        self._last_used = NONE

    def add(self, slot_bytes: int, slab: int, use: int) -> None:
        self._of_class.setdefault(slot_bytes, OrderedDict())[slab] = use
        self._last_used = NONE

    def remove(self, slot_bytes: int, slab: int) -> None:
        of_class = self._of_class[slot_bytes]
        del of_class[slab]
        if not of_class:
            del self._of_class[slot_bytes]
        self._last_used = NONE

    def use(self, slots: list[int], last_use: array[int], uses: int) -> int:
        """Pages were committed or read: note it in `last_use`, by slot, and for their slabs. `uses` is the
        counter of uses before; returns the counter after.
        """
        slots_per_slab, slab = self._slots.slots_per_slab, NONE
        for slot in slots:
            if slot // slots_per_slab != slab:
                if slab != NONE:
                    self._use_slab(slab, uses)
                slab = slot // slots_per_slab
            uses += 1
            last_use[slot] = uses
        if slots:
            self._use_slab(slab, uses)
        return uses

    def _use_slab(self, slab: int, use: int) -> None:
        of_class = self._of_class[self._slots.slab_class[slab]]
        of_class[slab] = use
        if slab != self._last_used:  # otherwise it is last already
            of_class.move_to_end(slab)
            self._last_used = slab

    def other_classes(self, slot_bytes: int) -> bool:
        """Whether another class has slabs."""
        return len(self._of_class) > (slot_bytes in self._of_class)

    def coldest(self, slot_bytes: int, is_idle: Callable[[int], bool]) -> tuple[int, int]:
        """The least recently used idle slab of another class, and its last use; NONE if there is none. Few
        slabs are skipped: a held page was used a lease ago at most.
        """
        best = best_use = NONE
        for other, of_class in self._of_class.items():
            if other == slot_bytes:
                continue
            for slab, use in of_class.items():
                if best != NONE and use >= best_use:
                    break
                if is_idle(slab):
                    best, best_use = slab, use
                    break
        return best, best_use

    def restore(self, slab_of: npt.NDArray[np.int64]) -> None:
        """`slab_of`: the slab of each page, oldest page first; the uses are 1, 2, ..."""
        last_use = np.zeros(self._slots.slabs, dtype=np.int64)
        last_use[slab_of] = np.arange(1, len(slab_of) + 1)  # of several uses of one slab the last stays
        for slab in np.argsort(last_use, kind="stable").tolist():
            slot_bytes = self._slots.slab_class[slab]
            if slot_bytes:
                self.add(slot_bytes, slab, int(last_use[slab]))

    def check(self) -> None:
        """Assert that each assigned slab is present once, in order. For tests."""
        for slot_bytes, of_class in self._of_class.items():
            assert list(of_class.values()) == sorted(of_class.values())
            assert all(self._slots.slab_class[slab] == slot_bytes for slab in of_class)
        assert sum(map(len, self._of_class.values())) == sum(map(bool, self._slots.slab_class))
