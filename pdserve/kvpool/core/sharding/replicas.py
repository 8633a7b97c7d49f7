"""Replicas on this node: copies of other nodes' pages. Pure.

A replica is an ordinary committed page with a lease. Its owner renews the lease while the page is to have
copies. A replica is dropped when its lease ends. If this node owns the page by then, the replica becomes the
page. Like any page that is written, replicas may evict the node's coldest pages.

All leases are of one length, so the entries lie in the order of their ends: a look is at those that are due,
EXPIRED_A_LOOK at most. Slots are not watched: an entry is valid while its slot holds the filling (sequence)
that it names. One whose page is gone counts until its lease ends or its slot has another replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Final

from pdserve.kvpool.core.events import Action
from pdserve.kvpool.core.sharding.ownership import TierPages
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.protocol.messages import GRANTED, PRESENT, Grant
from pdserve.kvpool.protocol.slot_table import COMMITTED, RESERVED

EXPIRED_A_LOOK: Final = 1024


@dataclass(slots=True)
class _Replica:
    namespace: int
    sequence: int
    slot_bytes: int
    until_s: float


class Replicas:
    """The replicas in this node's slots. `is_ours(keys)` says which pages this node owns now."""

    def __init__(
        self,
        store: PageStore,
        lease_s: float,
        is_ours: Callable[[Sequence[bytes]], Sequence[bool]],
        tiers: TierPages,
    ) -> None:
        self._store = store
        self._lease_s = lease_s
        self._is_ours = is_ours
        self._tiers = tiers
        self._slots: dict[int, _Replica] = {}  # the first to end first
        self._by_namespace: Counter[int] = Counter()
        self.slot_bytes = 0  # of all entries; an entry whose page is gone counts until `expire`
        self.expired = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, slot: object) -> bool:
        replica = self._slots.get(slot) if isinstance(slot, int) else None
        return isinstance(slot, int) and replica is not None and self._holds(slot, replica)

    def count(self, namespace: int) -> int:
        """The number of replicas of one namespace."""
        return self._by_namespace[namespace]

    def reserved(
        self,
        namespace: int,
        keys: Sequence[bytes],
        grants: Sequence[Grant],
        slot_bytes: int,
        now_s: float,
    ) -> None:
        """An owner asked for replicas of `keys`: new ones begin, existing ones are renewed."""
        until_s = now_s + self._lease_s
        for key, grant in zip(keys, grants, strict=True):
            if grant.status == GRANTED:
                self._forget(grant.slot)
                self._slots[grant.slot] = _Replica(namespace, grant.sequence, slot_bytes, until_s)
                self.slot_bytes += slot_bytes
                self._by_namespace[namespace] += 1
            elif grant.status == PRESENT:
                replica = self._slots.pop(slot := self._store.find(namespace, key), None)
                if replica is not None:
                    replica.until_s = until_s
                    self._slots[slot] = replica

    def add(self, slot: int, now_s: float) -> None:
        """The page in this slot, reserved or committed, is a replica."""
        facts = self._store.facts
        grant = Grant(GRANTED, slot, 0, facts.sequence[slot])
        slot_bytes = self._store.slots.slot_bytes(slot)
        self.reserved(facts.namespace[slot], [self._store.key_of(slot)], [grant], slot_bytes, now_s)

    def expire(self, now_s: float, out: list[Action]) -> None:
        """Drop replicas whose lease has ended; forget such entries whose page is gone."""
        ended = takewhile(lambda slot: self._slots[slot].until_s <= now_s, self._slots)
        due, gone, written = list[int](), list[int](), list[int]()
        for slot in islice(ended, EXPIRED_A_LOOK):
            if not self._holds(slot, self._slots[slot]):
                gone.append(slot)
            else:
                (due if self._store.state(slot) == COMMITTED else written).append(slot)
        for slot in gone:
            self._forget(slot)
        for slot in written:  # it is looked at again when those after it are
            self._slots[slot] = self._slots.pop(slot)
        self.expired += self._drop(due, out)

    def view_changed(self) -> None:
        """Replicas of pages that this node owns now become these pages."""
        key_of = self._store.facts.key
        found = [(key, slot) for slot in self._slots if (key := key_of[slot]) is not None]
        for (_, slot), ours in zip(found, self._is_ours([key for key, _ in found]), strict=True):
            if ours and slot in self:  # in this order: most are not, and that is told of all at once
                self._forget(slot)

    def _drop(self, slots: list[int], out: list[Action]) -> int:
        foreign = []
        for slot, ours in zip(slots, self._is_ours(self._keys(slots)), strict=True):
            self._forget(slot)
            if not ours and self._store.state(slot) == COMMITTED:
                foreign.append(slot)
                self._tiers.disown(self._store.facts.namespace[slot], self._keys([slot]), out)
        self._store.drop(foreign, out)
        return len(slots)

    def _holds(self, slot: int, replica: _Replica) -> bool:
        facts = self._store.facts
        return facts.sequence[slot] == replica.sequence and self._store.state(slot) in (COMMITTED, RESERVED)

    def _keys(self, slots: Sequence[int]) -> list[bytes]:
        return [key for slot in slots if (key := self._store.facts.key[slot]) is not None]

    def _forget(self, slot: int) -> None:
        replica = self._slots.pop(slot, None)
        if replica is not None:
            self.slot_bytes -= replica.slot_bytes
            self._by_namespace[replica.namespace] -= 1
            if not self._by_namespace[replica.namespace]:
                del self._by_namespace[replica.namespace]

    def check(self) -> None:
        """For tests."""
        assert self.slot_bytes == sum(replica.slot_bytes for replica in self._slots.values())
        assert self._by_namespace == Counter(replica.namespace for replica in self._slots.values())
