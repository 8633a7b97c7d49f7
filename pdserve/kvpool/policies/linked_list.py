"""Doubly linked lists threaded through arrays: 8 bytes per element, every change O(1)."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

NONE: Final = -1


class LinkedList:
    """One list of slot numbers. Lists may share their arrays: a slot is in at most one of them."""

    __slots__ = ("_after", "_before", "_length", "head", "tail")

    def __init__(self, before: array[int], after: array[int]) -> None:
        self._before = before
        self._after = after
        self.head = NONE
        self.tail = NONE
        self._length = 0

    def append(self, slot: int) -> None:
        tail = self.tail
        self._before[slot] = tail
        self._after[slot] = NONE
        if tail == NONE:
            self.head = slot
        else:
            self._after[tail] = slot
        self.tail = slot
        self._length += 1

    def prepend(self, slot: int) -> None:
        head = self.head
        self._before[slot] = NONE
        self._after[slot] = head
        if head == NONE:
            self.tail = slot
        else:
            self._before[head] = slot
        self.head = slot
        self._length += 1

    def remove(self, slot: int) -> None:
        before, after = self._before[slot], self._after[slot]
        if before == NONE:
            self.head = after
        else:
            self._after[before] = after
        if after == NONE:
            self.tail = before
        else:
            self._before[after] = before
        self._length -= 1

    def move_to_end(self, slot: int) -> None:
        if slot != self.tail:
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
        self.head, self.tail, self._length = int(slots[0]), int(slots[-1]), len(slots)

    def take_all(self, other: LinkedList) -> None:
        """Append all of `other`, which is empty afterwards. Both share their arrays."""
        if other.head == NONE:
            return
        if self.tail == NONE:
            self.head = other.head
        else:
            self._after[self.tail] = other.head
            self._before[other.head] = self.tail
        self.tail = other.tail
        self._length += other._length
        other.head = other.tail = NONE
        other._length = 0

    def __iter__(self) -> Iterator[int]:
        slot = self.head
        while slot != NONE:
            after = self._after[slot]  # read first: the slot may be moved to another list
            yield slot
            slot = after

    def __len__(self) -> int:
        return self._length
