"""Doubly linked lists threaded through arrays: 8 bytes per element, every change O(1).

**Ghosts** are evicted pages, remembered by a fingerprint of their key. Pure; O(1), at most 37 bytes each. A
hash table with chains, in typed arrays, that all policies of a node share. Each policy has lists of its own
in it, oldest ghost first. A Python dict would take four times the memory. A policy that ends gives its lists
back in O(1). Its ghosts stay in their chains until they are reused; nobody finds them, because a ghost holds
the policy's number, and numbers are not used again.

Clients choose keys. So a fingerprint is Python's hash, which has a secret of the process: no client can put
many ghosts into one chain, or make a key that is taken for another. Two keys of one policy may share a
fingerprint by chance. This is harmless: ghosts affect only the order of eviction. A policy never finds
another policy's ghost.
"""

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


_UNCHAINED: Final = 255
_SPREAD: Final = 0x9E37_79B9_7F4A_7C15
_MASK: Final = (1 << 64) - 1


class Ghosts:
    """`expected` ghosts have chains of one or two; more are possible."""

    def __init__(self, expected: int) -> None:
        self._bucket_mask = (1 << max(4, (expected - 1).bit_length())) - 1
        self._heads = array("i", [NONE]) * (self._bucket_mask + 1)
        self._next = array("i")  # in its chain
        self._fingerprint = array("Q")
        self._owner = array("Q")
        self._kind = array("B")  # as given to `add`
        self._before = array("i")
        self._after = array("i")
        self._free = self.new_list()
        self._owners = 0

    def new_owner(self) -> int:
        """A number for a policy, never given before."""
        self._owners += 1
        return self._owners

    def new_list(self) -> LinkedList:
        """An empty list of ghosts."""
        return LinkedList(self._before, self._after)

    def add(self, owner: int, key: bytes, kind: int, ghosts: LinkedList) -> None:
        """Remember the key at the end of `ghosts`; `kind` is 0 to 254. It is in no list of this owner."""
        ghost = self._free.head
        if ghost == NONE:
            ghost = len(self._kind)
            self._fingerprint.append(0)
            self._owner.append(owner)
            for column in (self._next, self._before, self._after):
                column.append(NONE)
            self._kind.append(_UNCHAINED)
        else:
            self._free.remove(ghost)
            if self._kind[ghost] != _UNCHAINED:
                self._unchain(ghost)
        fingerprint = _fingerprint(owner, key)
        bucket = fingerprint & self._bucket_mask
        self._fingerprint[ghost] = fingerprint
        self._owner[ghost] = owner
        self._kind[ghost] = kind
        self._next[ghost] = self._heads[bucket]
        self._heads[bucket] = ghost
        ghosts.append(ghost)

    def find(self, owner: int, key: bytes) -> int:
        """The owner's ghost of the key, or NONE."""
        fingerprint = _fingerprint(owner, key)
        ghost = self._heads[fingerprint & self._bucket_mask]
        while ghost != NONE and (self._fingerprint[ghost] != fingerprint or self._owner[ghost] != owner):
            ghost = self._next[ghost]
        return ghost

    def kind(self, ghost: int) -> int:
        return self._kind[ghost]

    def forget(self, ghost: int, ghosts: LinkedList) -> None:
        """Forget one of `ghosts`."""
        self._unchain(ghost)
        ghosts.remove(ghost)
        self._free.append(ghost)

    def forget_all(self, ghosts: LinkedList) -> None:
        """Forget a list of an owner that has ended; O(1)."""
        self._free.take_all(ghosts)

    def _unchain(self, ghost: int) -> None:
        self._kind[ghost] = _UNCHAINED
        bucket = self._fingerprint[ghost] & self._bucket_mask
        after, found = self._next[ghost], self._heads[bucket]
        if found == ghost:
            self._heads[bucket] = after
            return
        while self._next[found] != ghost:
            found = self._next[found]
        self._next[found] = after


def _fingerprint(owner: int, key: bytes) -> int:
    # a key that several owners remember is in a chain of each
    return (hash(key) ^ owner * _SPREAD) & _MASK
