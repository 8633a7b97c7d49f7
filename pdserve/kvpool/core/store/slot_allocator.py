"""Allocation of slots in the arena: slabs, size classes, slots. Pure; O(1) to allocate and to free.

The arena is `slabs` slabs of `slab_bytes`. A slab is unassigned, or holds slots of one size:

    arena   [ slab 0 ............ )[ slab 1 ............ )[ slab 2 ...
    slab    [ slot | slot | slot | tail )       tail = slab_bytes % slot_bytes, never used
    slot number = slab * slots_per_slab + position      slots_per_slab = slab_bytes // min_slot_bytes
    offset      = slab * slab_bytes + position * slot_bytes

A slot's size class is the page's length rounded up to 4 KiB, at least `min_slot_bytes`. Slabs are assigned
when a class first needs one, and unassigned when their last slot is freed, so space moves between classes.
Within a slab, slots at and after `bump` were never used; freed slots form a list threaded through
`next_free`.

This module knows only free and not free; slot_states.py knows the other states.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

SLOT_ALIGN_BYTES = 4096  # every slot starts on a memory page
NONE = -1


class SlotAllocator:
    """Slots of an arena of `capacity_bytes`, a multiple of `slab_bytes`."""

    def __init__(self, capacity_bytes: int, slab_bytes: int, min_slot_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.slab_bytes = slab_bytes
        self.min_slot_bytes = min_slot_bytes
        self.slabs = capacity_bytes // slab_bytes
        self.slots_per_slab = slab_bytes // min_slot_bytes
        self.slots = self.slabs * self.slots_per_slab
        self.slab_class = array("Q", bytes(8 * self.slabs))  # slot_bytes, 0 when unassigned
        self._live = array("I", bytes(4 * self.slabs))  # slots of the slab that are not free
        self._bump = array("I", bytes(4 * self.slabs))
        self._free_head = array("i", [NONE]) * self.slabs
        self._next_free = array("i", [NONE]) * self.slots
        self._unassigned = list(range(self.slabs - 1, -1, -1))
        self._partial: dict[int, dict[int, None]] = {}  # class -> its slabs that have a free slot
        self.tail_bytes = 0  # of all assigned slabs
        self.allocated_bytes = 0

    def class_of(self, length_bytes: int) -> int | None:
        """The slot size for a page of this length; None when it is larger than a slab."""
        slot_bytes = max(self.min_slot_bytes, -(-length_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES)
        return slot_bytes if slot_bytes <= self.slab_bytes else None

    def slots_in(self, slot_bytes: int) -> int:
        """How many slots of this size a slab holds."""
        return self.slab_bytes // slot_bytes

    def slab_of(self, slot: int) -> int:
        return slot // self.slots_per_slab

    def slot_bytes(self, slot: int) -> int:
        return self.slab_class[slot // self.slots_per_slab]

    def offset(self, slot: int) -> int:
        """Where the slot starts in the arena."""
        slab, position = divmod(slot, self.slots_per_slab)
        return slab * self.slab_bytes + position * self.slab_class[slab]

    @property
    def has_unassigned(self) -> bool:
        return bool(self._unassigned)

    def available(self, slot_bytes: int, at_most: int) -> int:
        """How many slots of this class `allocate` and `assign` can give, counted up to `at_most`."""
        in_slab = self.slots_in(slot_bytes)
        count = len(self._unassigned) * in_slab
        for slab in self._partial.get(slot_bytes, ()):
            if count >= at_most:
                break
            count += in_slab - self._live[slab]
        return min(count, at_most)

    def allocate(self, slot_bytes: int, count: int) -> list[int]:
        """Free slots in slabs of this class, up to `count`."""
        partial = self._partial.get(slot_bytes)
        slots: list[int] = []
        while partial and len(slots) < count:
            slab = next(reversed(partial))
            free = self.slots_in(slot_bytes) - self._live[slab]
            taken = min(free, count - len(slots))
            self._live[slab] += taken
            if taken == free:
                del partial[slab]
            slot = self._free_head[slab]
            while taken and slot != NONE:
                slots.append(slot)
                slot = self._next_free[slot]
                taken -= 1
            self._free_head[slab] = slot
            fresh = slab * self.slots_per_slab + self._bump[slab]
            slots += range(fresh, fresh + taken)
            self._bump[slab] += taken
        self.allocated_bytes += slot_bytes * len(slots)
        return slots

    def assign(self, slot_bytes: int) -> int:
        """Give the class an unassigned slab; its number, or NONE when all are assigned."""
        if not self._unassigned:
            return NONE
        slab = self._unassigned.pop()
        self.slab_class[slab] = slot_bytes
        self._live[slab] = self._bump[slab] = 0
        self._free_head[slab] = NONE
        self._partial.setdefault(slot_bytes, {})[slab] = None
        self.tail_bytes += self.slab_bytes % slot_bytes
        return slab

    def free(self, slot: int) -> bool:
        """Take the slot back; True when its slab became unassigned by that."""
        slab = slot // self.slots_per_slab
        slot_bytes = self.slab_class[slab]
        self.allocated_bytes -= slot_bytes
        self._live[slab] -= 1
        if self._live[slab] == 0:
            self._unassign(slab)
            return True
        self._next_free[slot] = self._free_head[slab]
        self._free_head[slab] = slot
        self._partial.setdefault(slot_bytes, {})[slab] = None
        return False

    def restore(self, slab_class: Sequence[int], taken: npt.NDArray[np.int64]) -> None:
        """Rebuild from a recovered table: `taken` are the slots not free, ascending, each at a valid position
        of a slab whose class is given. Slabs without such a slot stay unassigned.
        """
        slab_of_taken = taken // self.slots_per_slab
        starts = np.searchsorted(slab_of_taken, np.arange(self.slabs + 1))
        self._unassigned.clear()
        for slab in range(self.slabs - 1, -1, -1):
            mine = taken[starts[slab] : starts[slab + 1]]
            if not len(mine):
                self._unassigned.append(slab)
                continue
            self._restore_slab(slab, int(slab_class[slab]), mine - slab * self.slots_per_slab)

    def _restore_slab(self, slab: int, slot_bytes: int, positions: npt.NDArray[np.int64]) -> None:
        bump = int(positions[-1]) + 1
        free = np.ones(bump, dtype=bool)
        free[positions] = False
        holes = (np.flatnonzero(free) + slab * self.slots_per_slab).astype(np.int32)
        self.slab_class[slab] = slot_bytes
        self._bump[slab] = bump
        self._live[slab] = len(positions)
        if len(holes):
            links = np.frombuffer(self._next_free, dtype=np.int32)
            links[holes[:-1]] = holes[1:]
            links[holes[-1]] = NONE
            self._free_head[slab] = int(holes[0])
        if len(positions) < self.slots_in(slot_bytes):
            self._partial.setdefault(slot_bytes, {})[slab] = None
        self.tail_bytes += self.slab_bytes % slot_bytes
        self.allocated_bytes += slot_bytes * len(positions)

    def _unassign(self, slab: int) -> None:
        slot_bytes = self.slab_class[slab]
        self._partial.get(slot_bytes, {}).pop(slab, None)
        if not self._partial.get(slot_bytes):
            self._partial.pop(slot_bytes, None)
        self.tail_bytes -= self.slab_bytes % slot_bytes
        self.slab_class[slab] = 0
        self._unassigned.append(slab)

    def check(self, taken: Iterable[int]) -> None:
        """Assert that exactly the slots `taken` are not free, and that every free one can be allocated."""
        live = [0] * self.slabs
        for slot in taken:
            live[self.slab_of(slot)] += 1
            assert self.slab_class[self.slab_of(slot)], f"slot {slot} is taken in an unassigned slab"
        allocated = tails = 0
        for slab in range(self.slabs):
            slot_bytes = self.slab_class[slab]
            if not slot_bytes:
                assert slab in self._unassigned
                assert live[slab] == 0
                continue
            assert live[slab] == self._live[slab] > 0
            holes, slot = set(), self._free_head[slab]
            while slot != NONE:
                assert slot not in holes, f"slab {slab}: its free list has a cycle"
                holes.add(slot)
                slot = self._next_free[slot]
            assert self._live[slab] + len(holes) == self._bump[slab] <= self.slots_in(slot_bytes)
            assert (slab in self._partial.get(slot_bytes, {})) == (live[slab] < self.slots_in(slot_bytes))
            allocated += live[slab] * slot_bytes
            tails += self.slab_bytes % slot_bytes
        assert (allocated, tails) == (self.allocated_bytes, self.tail_bytes)
