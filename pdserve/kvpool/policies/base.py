"""What an eviction policy is. A policy suggests victims; the store decides, and skips pinned pages.

One policy instance orders the pages of one namespace and one size class. It knows slot numbers, and keys only
to remember evicted pages. It has no I/O, no lock and no clock (time is an argument). A slot is inserted once
before it is hit, evicted or removed.

All policies of a node share arrays by slot number (`Links`), because a slot is in one policy at most. So
memory depends on the size of the arena, not on the number of namespaces.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from pdserve.kvpool.policies.linked_list import NONE, Ghosts, LinkedList

__all__ = ["NONE", "EvictionPolicy", "LinkedList", "Links", "Slots", "Times"]

Slots: TypeAlias = Sequence[int] | npt.NDArray[np.int64]
Times: TypeAlias = npt.NDArray[np.float64]


class EvictionPolicy(Protocol):
    """An order of eviction. Every method is O(1), `victims` per step, `restore` vectorised."""

    def on_insert(self, slot: int, key: bytes, now_s: float) -> None:
        """The page in the slot was committed."""
        ...

    def on_hit(self, slot: int, now_s: float) -> None:
        """The page was read."""
        ...

    def on_demote(self, slot: int) -> None:
        """The page is to be evicted before others, until it is read again."""
        ...

    def on_evict(self, slot: int, key: bytes) -> None:
        """The page was evicted to make room."""
        ...

    def on_remove(self, slot: int) -> None:
        """The page is gone for another reason: it was dropped, or expired."""
        ...

    def victims(self) -> Iterator[int]:
        """Every slot held, the best to evict first. A change of the policy ends the iterator; slots that it
        gave may be moved to another policy before it continues.
        """
        ...

    def restore(self, slots: Slots, inserted_s: Times) -> None:
        """Insert many, oldest first, into an empty policy; `inserted_s` of shape [slots], ascending."""
        ...

    def close(self) -> None:
        """Forget evicted pages. Slots held stay in order; they are only looked at and removed afterwards."""
        ...

    def __len__(self) -> int: ...


class Links:
    """Arrays that all policies of a node share. For each slot: the links of its list (8 bytes); made on first
    use: one word (4 bytes), one time (8 bytes), and the ghosts of evicted pages.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.before = array("i", [NONE]) * slots
        self.after = array("i", [NONE]) * slots

    @cached_property
    def words(self) -> array[int]:
        """One unsigned 32-bit word per slot, of the policy that holds it."""
        return array("I", bytes(4 * self.slots))

    @cached_property
    def times_s(self) -> array[float]:
        """One time per slot, of the policy that holds it."""
        return array("d", bytes(8 * self.slots))

    @cached_property
    def ghosts(self) -> Ghosts:
        return Ghosts(self.slots)

    def new_list(self) -> LinkedList:
        """An empty list of slots."""
        return LinkedList(self.before, self.after)
