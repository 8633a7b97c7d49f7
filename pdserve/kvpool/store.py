"""The pages of a node: the states of slots, eviction, accounting. Pure; appends its table updates to `out`.

    from          to            by
    FREE          RESERVED      reserve
    COMMITTED     RESERVED      reserve: evicted, and its slot filled anew
    RESERVED      COMMITTED     commit
    RESERVED      FREE          give_back: aborted, failed, or the writer is gone and nothing writes any more
    RESERVED      QUARANTINED   quarantine: the page can never be committed, but somebody may still be writing
    QUARANTINED   FREE          give_back: now nobody is
    COMMITTED     FREE          dropped while nobody held it, evicted with all of its slab
    COMMITTED     DOOMED        dropped while held: found by nobody new, bytes stay for those who hold it
    DOOMED        FREE          the last holder let go

Only COMMITTED pages are found by key. `holds` counts who is reading a slot; a held slot is neither evicted
nor freed. At all times, in bytes of slots: free + used + reserved + quarantined = capacity, where used is
COMMITTED and DOOMED, and free includes unassigned slabs and tails; `check` recounts it.

Space is found in this order: a free slot of the class; an unassigned slab; the slab of another class that was
not used for longer than our own best victim (so that classes share the arena by recency); our own best
victim.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import compress, repeat
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pdserve.kvpool.events import Action, AssignSlab, FreeRow, WriteRow
from pdserve.kvpool.index import NONE, Facts, Index, NamespacePages
from pdserve.kvpool.policies.base import EvictionPolicy, Links
from pdserve.kvpool.policies.lru import Lru
from pdserve.kvpool.recovery import TableContents
from pdserve.kvpool.slots import SlotAllocator
from pdserve.kvpool.table import COMMITTED as ROW_COMMITTED
from pdserve.kvpool.table import RESERVED as ROW_RESERVED

FREE: Final = 0
RESERVED: Final = 1
COMMITTED: Final = 2
DOOMED: Final = 3
QUARANTINED: Final = 4


class PageStore:
    """All slots of one arena. `first_sequence` must exceed every sequence that an earlier
    incarnation used.
    """

    def __init__(
        self,
        slots: SlotAllocator,
        first_sequence: int,
        make_policy: Callable[[Links], EvictionPolicy] = Lru,
    ) -> None:
        self.slots = slots
        self.index = Index()
        self.facts = Facts(slots.slots)
        self.bytes_in_state = [slots.capacity_bytes, 0, 0, 0, 0]
        self.evictions = 0
        self._state = bytearray(slots.slots)
        self._holds: dict[int, int] = {}
        self._next_sequence = first_sequence
        self._uses = 0  # counts insertions and hits: the time scale of last_use
        self._slabs: dict[int, OrderedDict[int, int]] = {}  # class -> slab -> last use, coldest first
        self._links = Links(slots.slots)
        self._make_policy = make_policy
        self._policies: dict[int, dict[int, EvictionPolicy]] = {}  # slot_bytes -> namespace -> policy

    # --- looking

    def find(self, namespace: int, key: bytes) -> int:
        """The slot of a committed page, or NONE."""
        return self.index.find(namespace, key)

    def state(self, slot: int) -> int:
        return self._state[slot]

    def holds(self, slot: int) -> int:
        """How many hold the slot."""
        return self._holds.get(slot, 0)

    def committed_mask(self, start: int, end: int) -> npt.NDArray[np.bool_]:
        """Which of the slots [start, end) are COMMITTED."""
        mask: npt.NDArray[np.bool_] = np.frombuffer(self._state, np.uint8)[start:end] == COMMITTED
        return mask

    def namespace_of(self, slot: int) -> int:
        """The number of the namespace of a slot that is not free."""
        return self.facts.namespace[slot]

    def committed_slots(self, start: int, limit: int, namespace: int | None = None) -> npt.NDArray[np.int64]:
        """The first `limit` slots of committed pages from `start` on, ascending; of one namespace, or of
        all. One vectorised look at the states of all slots that follow.
        """
        found = np.frombuffer(self._state, np.uint8)[start:] == COMMITTED
        if namespace is not None:
            found &= np.frombuffer(self.facts.namespace, np.uint32)[start:] == namespace
        return np.flatnonzero(found)[:limit] + start

    @property
    def held_slots(self) -> int:
        return len(self._holds)

    # --- writing

    def reserve(
        self, namespace: int, key: bytes, length_bytes: int, slot_bytes: int, out: list[Action]
    ) -> int | None:
        """A slot of the class `slot_bytes`, which is that of `length_bytes`, for a key that is neither
        committed nor being written; None when nothing can make room.
        """
        slot = self._make_room(slot_bytes, out)
        if slot == NONE:
            return None
        facts = self.facts
        facts.key[slot] = key
        facts.namespace[slot] = namespace
        facts.length_bytes[slot] = length_bytes
        facts.checksum[slot] = 0
        facts.sequence[slot] = sequence = self._next_sequence
        self._next_sequence += 1
        self.index.namespace(namespace).writing[key] = slot
        self._move(slot, RESERVED)
        self._use(slot, slot_bytes)
        out.append(WriteRow(slot, ROW_RESERVED, key, namespace, length_bytes, 0, sequence))
        return slot

    def commit(self, slot: int, checksum: int, now_s: float, out: list[Action]) -> None:
        """Make a RESERVED page readable."""
        facts = self.facts
        key, namespace = self._key(slot), facts.namespace[slot]
        length_bytes, sequence = facts.length_bytes[slot], facts.sequence[slot]
        pages = self.index.namespace(namespace)
        del pages.writing[key]
        pages.committed[key] = slot
        pages.page_bytes += length_bytes
        pages.written += 1
        pages.written_bytes += length_bytes
        facts.checksum[slot] = checksum
        slot_bytes = self._move(slot, COMMITTED)
        self._use(slot, slot_bytes)
        self._policy(namespace, slot_bytes).on_insert(slot, key, now_s)
        out.append(WriteRow(slot, ROW_COMMITTED, key, namespace, length_bytes, checksum, sequence))

    def quarantine(self, slot: int) -> None:
        """A RESERVED page will not be committed; its key is free to be reserved again, its slot is not."""
        del self.index.namespace(self.facts.namespace[slot]).writing[self._key(slot)]
        self._move(slot, QUARANTINED)

    def give_back(self, slot: int, out: list[Action]) -> None:
        """Free a RESERVED or QUARANTINED slot."""
        if self._state[slot] == RESERVED:
            del self.index.namespace(self.facts.namespace[slot]).writing[self._key(slot)]
        self._free(slot, out)

    # --- reading

    def touch(self, slot: int, now_s: float) -> None:
        """The page was read."""
        slot_bytes = self.slots.slot_bytes(slot)
        self._use(slot, slot_bytes)
        self._policy(self.facts.namespace[slot], slot_bytes).on_hit(slot, now_s)

    def hold(self, slot: int) -> None:
        self._holds[slot] = self._holds.get(slot, 0) + 1

    def let_go(self, slot: int, out: list[Action]) -> None:
        """Undo one `hold`."""
        left = self._holds[slot] - 1
        if left:
            self._holds[slot] = left
            return
        del self._holds[slot]
        if self._state[slot] == DOOMED:
            self._free(slot, out)

    # --- dropping

    def drop(self, slot: int, out: list[Action]) -> None:
        """A COMMITTED page is found no more, from now on; its slot is freed when nobody holds it."""
        self._unlink(slot)
        if slot in self._holds:
            self._move(slot, DOOMED)
            out.append(FreeRow(slot))  # not recovered after a crash, and readers' own check fails
        else:
            self._free(slot, out)

    def _unlink(self, slot: int, *, evicted: bool = False) -> NamespacePages:
        """Take a COMMITTED page out of index and policy."""
        namespace, key = self.facts.namespace[slot], self._key(slot)
        pages = self.index.namespace(namespace)
        del pages.committed[key]
        pages.page_bytes -= self.facts.length_bytes[slot]
        policy = self._policy(namespace, self.slots.slot_bytes(slot))
        if evicted:
            policy.on_evict(slot, key)
        else:
            policy.on_remove(slot)
        return pages

    def clear(self, namespace: int, out: list[Action]) -> int:
        """Drop every page of the namespace; how many."""
        dropped = list(self.index.namespace(namespace).committed.values())
        for slot in dropped:
            self.drop(slot, out)
        return len(dropped)

    def forget(self, namespace: int) -> None:
        """The namespace is dropped, and has neither pages nor reservations left."""
        self.index.forget(namespace)
        for policies in self._policies.values():
            policies.pop(namespace, None)

    # --- restart

    def restore(self, contents: TableContents, now_s: float) -> None:
        """Take over what recovery kept, into an empty store; quarantined slots have no key any more."""
        taken = np.sort(np.concatenate([contents.slots, np.array(contents.quarantined, dtype=np.int64)]))
        self.slots.restore(contents.slab_class, taken)
        facts, slots = self.facts, contents.slots
        by_age = slots[np.argsort(contents.sequences, kind="stable")]
        np.frombuffer(facts.namespace, np.uint32)[slots] = contents.namespaces
        np.frombuffer(facts.length_bytes, np.uint32)[slots] = contents.lengths
        np.frombuffer(facts.checksum, np.uint64)[slots] = contents.checksums
        np.frombuffer(facts.sequence, np.uint64)[slots] = contents.sequences
        np.frombuffer(facts.last_use, np.uint64)[by_age] = np.arange(1, len(slots) + 1)
        np.frombuffer(self._state, np.uint8)[slots] = COMMITTED
        np.frombuffer(self._state, np.uint8)[contents.quarantined] = QUARANTINED
        self._uses = len(slots)
        self._restore_slabs(by_age // self.slots.slots_per_slab)
        self._restore_keys(contents)
        self._restore_policies(by_age, now_s)
        quarantined = sum(self.slots.slot_bytes(slot) for slot in contents.quarantined)
        used = self.slots.allocated_bytes - quarantined
        self.bytes_in_state = [self.slots.capacity_bytes - used - quarantined, 0, used, 0, quarantined]
        if len(slots):
            self._next_sequence = max(self._next_sequence, int(contents.sequences.max()) + 1)

    def _restore_slabs(self, slab_of: npt.NDArray[np.int64]) -> None:
        """`slab_of`: the slab of each page, oldest page first."""
        last_use = np.zeros(self.slots.slabs, dtype=np.int64)
        last_use[slab_of] = np.arange(1, len(slab_of) + 1)  # of several uses of one slab the last stays
        for slab in np.argsort(last_use, kind="stable").tolist():
            slot_bytes = self.slots.slab_class[slab]
            if slot_bytes:
                self._slabs.setdefault(slot_bytes, OrderedDict())[slab] = int(last_use[slab])

    def _restore_keys(self, contents: TableContents) -> None:
        slots = contents.slots.tolist()
        key_of = np.full(self.slots.slots, None, dtype=object)  # faster than a loop over the list
        key_of[contents.slots] = contents.keys
        self.facts.key = key_of.tolist()
        for namespace in _distinct(contents.namespaces):
            mine = contents.namespaces == namespace
            pages = self.index.namespace(namespace)
            chosen = repeat(True) if mine.all() else mine.tolist()
            pages.committed = dict(compress(zip(contents.keys, slots, strict=True), chosen))
            pages.page_bytes = int(contents.lengths[mine].sum())

    def _restore_policies(self, by_age: npt.NDArray[np.int64], now_s: float) -> None:
        """`by_age`: the slots of all pages, oldest page first."""
        namespaces = np.frombuffer(self.facts.namespace, np.uint32)[by_age]
        classes = np.frombuffer(self.slots.slab_class, np.uint64)[by_age // self.slots.slots_per_slab]
        for slot_bytes in _distinct(classes):
            of_class = classes == slot_bytes
            for namespace in _distinct(namespaces[of_class]):
                mine = by_age[of_class & (namespaces == namespace)]
                self._policy(namespace, slot_bytes).restore(mine, np.full(len(mine), now_s))

    # --- room

    def _make_room(self, slot_bytes: int, out: list[Action]) -> int:
        slots = self.slots
        slot = slots.allocate(slot_bytes)
        if slot != NONE:
            return slot
        if not slots.has_unassigned:
            victim = self._best_victim(slot_bytes)
            newer_than = self.facts.last_use[victim] if victim != NONE else self._uses + 1
            if not self._take_over_slab(slot_bytes, newer_than, out):
                if victim != NONE:
                    self._count_eviction(self._unlink(victim, evicted=True))
                return victim  # its slot as it is: RESERVED will follow COMMITTED, in one row written
        slab = slots.assign(slot_bytes)
        assert slab != NONE
        self._slabs.setdefault(slot_bytes, OrderedDict())[slab] = self._uses
        out.append(AssignSlab(slab, slot_bytes))
        return slots.allocate(slot_bytes)

    def _best_victim(self, slot_bytes: int) -> int:
        """Of each namespace's best victim that nobody holds, the one unused for longest; or NONE."""
        best = NONE
        last_use = self.facts.last_use
        for policy in self._policies.get(slot_bytes, {}).values():
            for victim in policy.victims():
                if victim not in self._holds:
                    if best == NONE or last_use[victim] < last_use[best]:
                        best = victim
                    break
        return best

    def _take_over_slab(self, slot_bytes: int, newer_than: int, out: list[Action]) -> bool:
        """Empty the slab of another class that was unused for longest, if that is longer than
        `newer_than`.
        """
        coldest = [
            found
            for other, slabs in self._slabs.items()
            if other != slot_bytes and (found := self._coldest_slab(slabs, newer_than))
        ]
        if not coldest:
            return False
        _, slab = min(coldest)
        start = slab * self.slots.slots_per_slab
        for slot in range(start, start + self.slots.slots_per_slab):
            if self._state[slot] == COMMITTED:
                self._count_eviction(self.index.namespace(self.facts.namespace[slot]))
                self.drop(slot, out)
        return True

    def _coldest_slab(self, slabs: OrderedDict[int, int], newer_than: int) -> tuple[int, int] | None:
        """Last use and number of the first slab, coldest first, that nobody reads or writes.

        Those skipped are few: who holds a page used it a lease ago at most.
        """
        for slab, last_use in slabs.items():
            if last_use >= newer_than:
                return None
            start = slab * self.slots.slots_per_slab
            end = start + self.slots.slots_per_slab
            states = self._state[start:end]
            if RESERVED in states or QUARANTINED in states:
                continue
            if self._holds.keys().isdisjoint(range(start, end)):
                return last_use, slab
        return None

    def _count_eviction(self, pages: NamespacePages) -> None:
        self.evictions += 1
        pages.evictions += 1

    # --- states

    def _move(self, slot: int, state: int) -> int:
        """Account for the change; the slot's size."""
        slot_bytes = self.slots.slot_bytes(slot)
        self.bytes_in_state[self._state[slot]] -= slot_bytes
        self.bytes_in_state[state] += slot_bytes
        self._state[slot] = state
        return slot_bytes

    def _free(self, slot: int, out: list[Action]) -> None:
        slot_bytes = self._move(slot, FREE)
        self.facts.key[slot] = None
        out.append(FreeRow(slot))
        if self.slots.free(slot):
            slab = self.slots.slab_of(slot)
            del self._slabs[slot_bytes][slab]
            out.append(AssignSlab(slab, 0))

    def _use(self, slot: int, slot_bytes: int) -> None:
        self._uses = uses = self._uses + 1
        self.facts.last_use[slot] = uses
        slabs, slab = self._slabs[slot_bytes], slot // self.slots.slots_per_slab
        slabs[slab] = uses
        slabs.move_to_end(slab)

    def _key(self, slot: int) -> bytes:
        key = self.facts.key[slot]
        assert key is not None
        return key

    def _policy(self, namespace: int, slot_bytes: int) -> EvictionPolicy:
        by_namespace = self._policies.setdefault(slot_bytes, {})
        policy = by_namespace.get(namespace)
        if policy is None:
            policy = by_namespace[namespace] = self._make_policy(self._links)
        return policy

    # --- conservation

    def slots_in_state(self, state: int) -> list[int]:
        """Ascending. Slow: for tests."""
        return [slot for slot, found in enumerate(self._state) if found == state]

    def check(self) -> None:
        """Assert that every page and every byte is accounted for. Slow: for tests."""
        taken = [slot for slot, state in enumerate(self._state) if state != FREE]
        self.slots.check(taken)
        counted = [0] * 5
        for slot in taken:
            counted[self._state[slot]] += self.slots.slot_bytes(slot)
        counted[FREE] = self.slots.capacity_bytes - sum(counted)
        assert counted == self.bytes_in_state
        assert self.slots.allocated_bytes == sum(counted[1:])
        assert counted[FREE] >= 0
        indexed = dict(self._indexed())
        assert len(indexed) == sum(self._state[slot] in (RESERVED, COMMITTED) for slot in taken)
        for slot, (state, namespace, key) in indexed.items():
            assert (self._state[slot], self.facts.namespace[slot]) == (state, namespace)
            assert self.facts.key[slot] == key
        for slot in self._holds:
            assert self._state[slot] in (COMMITTED, DOOMED)
        for slot_bytes, slabs in self._slabs.items():
            assert list(slabs.values()) == sorted(slabs.values())
            assert all(self.slots.slab_class[slab] == slot_bytes for slab in slabs)
        assert sum(map(len, self._slabs.values())) == sum(map(bool, self.slots.slab_class))
        assert all(slot in self._holds for slot in taken if self._state[slot] == DOOMED)
        self._check_policies(slot for slot in taken if self._state[slot] == COMMITTED)

    def _check_policies(self, committed: Iterable[int]) -> None:
        ordered = [
            slot
            for by_namespace in self._policies.values()
            for policy in by_namespace.values()
            for slot in policy.victims()
        ]
        assert sorted(ordered) == sorted(committed)

    def _indexed(self) -> Iterator[tuple[int, tuple[int, int, bytes]]]:
        for namespace, pages in self.index:
            assert not pages.committed.keys() & pages.writing.keys()
            assert pages.page_bytes == sum(self.facts.length_bytes[slot] for slot in pages.committed.values())
            for state, slots in ((COMMITTED, pages.committed), (RESERVED, pages.writing)):
                for key, slot in slots.items():
                    yield slot, (state, namespace, key)


def _distinct(values: npt.NDArray[Any]) -> list[int]:
    """The different values; quick where there is but one."""
    if len(values) and (values == values[0]).all():
        return [int(values[0])]
    found: list[int] = np.unique(values).tolist()
    return found
