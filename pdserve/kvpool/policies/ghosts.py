"""Evicted pages, remembered by a fingerprint of their key. Pure; O(1), at most 37 bytes each.

A hash table with chains, in typed arrays, that all policies of a node share. Each policy has lists of its own
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
from typing import Final

from pdserve.kvpool.policies.linked_list import NONE, LinkedList

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
