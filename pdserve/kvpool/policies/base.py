"""What an eviction policy is. A policy suggests, the store disposes: it skips pages that are pinned.

One policy instance orders the pages of one namespace and one size class. It holds slot numbers, nothing else:
no I/O, no lock, no clock (time is an argument). A slot is inserted once before it is hit or removed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

NONE = -1


class EvictionPolicy(Protocol):
    """An order of eviction. Every method is O(1), `victims` per step."""

    def on_insert(self, slot: int, now_s: float) -> None:
        """The page in the slot was committed."""
        ...

    def on_hit(self, slot: int, now_s: float) -> None:
        """The page was read."""
        ...

    def on_remove(self, slot: int) -> None:
        """The page is gone, evicted or dropped."""
        ...

    def victims(self) -> Iterator[int]:
        """Every slot held, the best to evict first. The iterator ends with the first change."""
        ...

    def restore(self, slots: Sequence[int], now_s: float) -> None:
        """Insert many, oldest first, into an empty policy."""
        ...

    def __len__(self) -> int: ...


class Links:
    """Links of doubly linked lists of slots, shared by all policies of a node: a slot is in at most one list.

    8 bytes per slot, whatever number of lists.
    """

    def __init__(self, slots: int) -> None:
        self.before = array("i", [NONE]) * slots
        self.after = array("i", [NONE]) * slots


class LinkedList:
    """One list threaded through shared Links: append, remove and iterate, oldest first."""

    def __init__(self, links: Links) -> None:
        self._before = links.before
        self._after = links.after
        self.head = NONE
        self._tail = NONE
        self._length = 0

    def append(self, slot: int) -> None:
        self._before[slot] = self._tail
        self._after[slot] = NONE
        if self._tail == NONE:
            self.head = slot
        else:
            self._after[self._tail] = slot
        self._tail = slot
        self._length += 1

    def remove(self, slot: int) -> None:
        before, after = self._before[slot], self._after[slot]
        if before == NONE:
            self.head = after
        else:
            self._after[before] = after
        if after == NONE:
            self._tail = before
        else:
            self._before[after] = before
        self._length -= 1

    def move_to_end(self, slot: int) -> None:
        if slot != self._tail:
            self.remove(slot)
            self.append(slot)

    def extend(self, slots: npt.NDArray[np.int32]) -> None:
        """Append many to an empty list, vectorised."""
        if not len(slots):
            return
        before = np.frombuffer(self._before, dtype=np.int32)
        after = np.frombuffer(self._after, dtype=np.int32)
        before[slots[1:]] = slots[:-1]
        after[slots[:-1]] = slots[1:]
        before[slots[0]] = after[slots[-1]] = NONE
        self.head, self._tail, self._length = int(slots[0]), int(slots[-1]), len(slots)

    def __iter__(self) -> Iterator[int]:
        slot = self.head
        while slot != NONE:
            yield slot
            slot = self._after[slot]

    def __len__(self) -> int:
        return self._length
