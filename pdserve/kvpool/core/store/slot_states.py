"""The states of an arena's slots, and every step that one slot takes. Pure; appends table updates to `out`.

    from          to            by
    FREE          RESERVED      take
    COMMITTED     RESERVED      take: the page was evicted, its slot is filled anew
    RESERVED      COMMITTED     commit
    RESERVED      FREE          give_back: aborted, failed, or the client is gone and nothing writes any more
    RESERVED      QUARANTINED   quarantine: the page can never be committed, but a writer may still be writing
    QUARANTINED   FREE          give_back: the writer has stopped
    COMMITTED     FREE          drop: dropped, expired or evicted while nobody held it
    COMMITTED     SWEEPING      clear: dropped with its whole namespace (lazy_free.py)
    SWEEPING      FREE          sweep: by `tick`, or by a reservation that needs the room
    COMMITTED     DOOMED        drop: a reader holds it; no lookup finds it, its bytes stay for that reader
    DOOMED        FREE          let_go: the last reader has finished

Only COMMITTED pages are found by key. `held` counts the readers of a slot. A held slot is neither evicted nor
freed. In bytes of slots, free + used + reserved + quarantined = capacity. "Used" is COMMITTED and DOOMED;
"free" includes SWEEPING, unassigned slabs and slab tails. `invariants.check` recounts all of it.

A held page that the search for victims meets leaves its order of eviction (`aside`) until its last reader has
let go, so that no later search passes it again. Then it is the first of its order, as it was before.

**Removed pages.** Which pages a node had, when they went and why: for the question why a read was a miss. A
table of fixed size, one place for each fingerprint; a newer page takes the place of an older one. So what
it knows may be forgotten, and costs O(1) time and 17 bytes a place. A restart of the node forgets all.

Clients choose keys. So a fingerprint is Python's hash, which has a secret of the process: no client can aim
at a place, or make a key that is taken for another.

**Residue.** The namespace whose bytes are still in each slot, including free slots. A removed page leaves its
bytes in the slot. The next writer may send fewer bytes than it reserved, or none, and still commit. So a slot
with bytes of another namespace is wiped before the writer knows its grant. Bytes of the same namespace stay:
a client that may read the new page could read the old one too.

When a slab gets another class, its bytes lie in other slots. If all its slots had bytes of one namespace, the
new slots have too. Otherwise the bytes are UNKNOWN, and each slot is wiped at its next use. The same holds
for all slots that a restart did not keep. The memory of a new arena is zero: its first use costs nothing.

**Recency.** The last use of each slab is known, since size classes share the arena by recency; O(1).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pdserve.kvpool.core.events import Action, AssignSlab, FreeRows
from pdserve.kvpool.core.store.index import NONE, REASONS, Facts, Index, NamespacePages
from pdserve.kvpool.core.store.lazy_free import Sweep
from pdserve.kvpool.core.store.slot_allocator import SlotAllocator
from pdserve.kvpool.policies.base import EvictionPolicy, Links
from pdserve.kvpool.protocol.slot_table import COMMITTED, DOOMED, FREE, SWEEPING, SlotState


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


MIN_PLACES: Final = 1 << 10
MAX_PLACES: Final = 1 << 20
_SPREAD: Final = 0x9E37_79B9_7F4A_7C15
_MASK: Final = (1 << 64) - 1


class Removal(NamedTuple):
    """`reason`: a place in index.REASONS. `removed_s`: a time of the node's clock."""

    reason: int
    removed_s: float


class RemovedPages:
    """The newest removal of each of the pages that were removed last, about as many as there are slots."""

    def __init__(self, slots: int) -> None:
        places = min(MAX_PLACES, max(MIN_PLACES, 1 << max(0, slots - 1).bit_length()))
        self._mask = places - 1
        self._fingerprint = array("Q", bytes(8 * places))
        self._reason = bytearray(places)
        self._removed_s = array("d", bytes(8 * places))

    def note(self, namespace: int, key: bytes, reason: int, now_s: float) -> None:
        """The page is removed now."""
        fingerprint = _fingerprint(namespace, key)
        place = fingerprint & self._mask
        self._fingerprint[place] = fingerprint
        self._reason[place] = reason
        self._removed_s[place] = now_s

    def find(self, namespace: int, key: bytes) -> Removal | None:
        """When the page was removed last, and why; None: never, or so long ago that it is forgotten."""
        fingerprint = _fingerprint(namespace, key)
        place = fingerprint & self._mask
        if self._fingerprint[place] != fingerprint:
            return None
        return Removal(self._reason[place], self._removed_s[place])


def _fingerprint(namespace: int, key: bytes) -> int:
    # 0 is an empty place
    return (hash(key) ^ (namespace + 1) * _SPREAD) & _MASK or 1


NOBODY: Final = 0  # the slot is zero
UNKNOWN: Final = (1 << 32) - 1


class Residue:
    """For each slot: the number of a namespace, NOBODY or UNKNOWN."""

    def __init__(self, slots: SlotAllocator) -> None:
        self._slots = slots
        self._of = array("I", bytes(4 * slots.slots))
        self._around = array("I", bytes(4 * slots.slabs))  # of the slab's bytes outside its slots
        self._class = array(
            "Q", bytes(8 * slots.slabs)
        )  # the slab's class when `_of` was set; kept when it is unassigned

    def assigned(self, slab: int) -> None:
        """A class was given to a slab; all its slots are free."""
        slot_bytes = self._slots.slab_class[slab]
        if self._class[slab] == slot_bytes:
            return
        start = slab * self._slots.slots_per_slab
        mine = np.frombuffer(self._of, np.uint32)[start : start + self._slots.slots_per_slab]
        owners = {*mine.tolist(), self._around[slab]} - {NOBODY}  # np.unique loads 1.4 MB first, for 8 ms
        mine[:] = self._around[slab] = NOBODY if not owners else owners.pop() if len(owners) == 1 else UNKNOWN
        self._class[slab] = slot_bytes

    def take(self, slots: list[int], namespace: int) -> list[tuple[int, int]]:
        """A namespace gets these slots; the byte ranges of the arena to wipe before, half-open."""
        wipe, of = [], self._of
        for slot in [slot for slot in slots if of[slot] != namespace]:
            if of[slot] != NOBODY:
                start = self._slots.offset(slot)
                wipe.append((start, start + self._slots.slot_bytes(slot)))
            of[slot] = namespace
        return wipe

    def wiped(self, slot: int) -> None:
        """The bytes of a slot were set to zero."""
        self._of[slot] = NOBODY

    def restore(self, slots: npt.NDArray[np.int64], namespaces: npt.NDArray[np.uint32]) -> None:
        """After a restart: the slots of the pages kept, and their namespaces."""
        of = np.frombuffer(self._of, np.uint32)
        of[:] = UNKNOWN
        of[slots] = namespaces
        np.frombuffer(self._around, np.uint32)[:] = UNKNOWN
        self._class[:] = self._slots.slab_class


LOOKED_AT: Final = 65_536  # slots in one step of numpy: 50 µs
REASON_NUMBERS: Final = {reason: number for number, reason in enumerate(REASONS)}


class SlotStates:
    """All slots of one arena: their states, their pages, and the sums of both."""

    def __init__(self, slots: SlotAllocator) -> None:
        self.slots = slots
        self.index = Index()
        self.facts = Facts(slots.slots)
        self.states = bytearray(slots.slots)
        self.bytes_in_state = [slots.capacity_bytes] + [0] * (len(SlotState) - 1)
        self.held: dict[int, int] = {}  # slot -> readers
        self.aside: set[int] = set()  # held COMMITTED slots that are in no order of eviction meanwhile
        self.kept = array("I", bytes(4 * slots.slabs))  # by slab: committed pages that are never evicted
        self.slab_use = SlabUse(slots)
        self.residue = Residue(slots)
        self.sweeps: list[Sweep] = []
        self.to_wipe = bytearray(slots.slots)  # by slot, 1: its bytes are set to zero when it is freed
        self.wiping = 0  # slots with a 1
        self._wipes: list[tuple[int, int]] = []  # byte ranges of slots that were freed a moment ago
        self.links = Links(slots.slots)
        self.uses = 0  # insertions and hits so far: the time scale of `last_use`
        self.evictions = 0
        self.removed = RemovedPages(slots.slots)
        self.now_s = 0.0  # of the event that is handled
        self.on_evict: Callable[[int], None] | None = None  # called with the slot of an evicted page
        self.in_tier: Callable[[int, bytes], bool] | None = None  # whether a tier has the page
        self.on_change: Callable[[int, bytes | None], None] | None = None
        """Called with namespace and key of a page that came or went. None: all of the namespace went."""

    # --- looking

    def find(self, namespace: int, key: bytes) -> int:
        """The slot of a committed page, or NONE. It may have expired: see `NamespacePages.lookup`."""
        return self.index.find(namespace, key)

    def state(self, slot: int) -> int:
        return self.states[slot]

    def holds(self, slot: int) -> int:
        """The number of readers of the slot."""
        return self.held.get(slot, 0)

    def slots_in_state(self, state: int) -> list[int]:
        """Ascending. Slow: for tests."""
        return [slot for slot, found in enumerate(self.states) if found == state]

    def committed_slots(self, start: int, limit: int, namespace: int | None = None) -> npt.NDArray[np.int64]:
        """The first `limit` slots of committed pages from `start` on, of one namespace or of all."""
        states, numbers = np.frombuffer(self.states, np.uint8), np.frombuffer(self.facts.namespace, np.uint32)
        parts, count = [np.empty(0, np.int64)], 0
        while start < len(states) and count < limit:
            block = slice(start, start + LOOKED_AT)
            found = states[block] == COMMITTED
            if namespace is not None:
                found &= numbers[block] == namespace
            parts.append(np.flatnonzero(found) + start)
            count += len(parts[-1])
            start += LOOKED_AT
        return np.concatenate(parts)[:limit]

    @property
    def free_bytes(self) -> int:
        """The bytes that reservations may take without evicting a page."""
        return self.bytes_in_state[FREE] + self.bytes_in_state[SWEEPING]

    def key_of(self, slot: int) -> bytes:
        """The key of a slot that is not free."""
        key = self.facts.key[slot]
        assert key is not None
        return key

    # --- readers

    def hold(self, slot: int) -> None:
        self.held[slot] = self.held.get(slot, 0) + 1

    def let_go(self, slot: int, out: list[Action]) -> None:
        """Undo one `hold`."""
        left = self.held[slot] - 1
        if left:
            self.held[slot] = left
            return
        del self.held[slot]
        if self.states[slot] == DOOMED:
            self.free([slot], out)
        elif slot in self.aside:
            self.put_back(slot).on_demote(slot)

    def set_aside(self, slots: Sequence[int]) -> None:
        """Take held COMMITTED pages out of their orders of eviction until they are let go, or read."""
        for slot in slots:
            self._order_of(slot).on_remove(slot)
        self.aside.update(slots)

    def put_back(self, slot: int) -> EvictionPolicy:
        """Undo `set_aside`; the page is the newest of its order then."""
        self.aside.discard(slot)
        order = self._order_of(slot)
        order.on_insert(slot, self.key_of(slot), self.facts.committed_s[slot])
        return order

    def _order_of(self, slot: int) -> EvictionPolicy:
        return self.index.namespace(self.facts.namespace[slot]).orders[self.slots.slot_bytes(slot)]

    # --- steps

    def move(self, slot: int, slot_bytes: int, state: int) -> None:
        in_state, states = self.bytes_in_state, self.states
        in_state[states[slot]] -= slot_bytes
        in_state[state] += slot_bytes
        states[slot] = state

    def drop(self, slots: Sequence[int], out: list[Action], reason: str = "dropped") -> None:
        """No lookup finds these COMMITTED pages from now on. A slot is freed when nobody holds it.

        The row of a held slot is freed at once: a restart does not recover the page, and mapped readers see
        that their copy is void.
        """
        unassigned: list[int] = []
        for slot in slots:
            self.unlink(slot, reason)
            if slot in self.held:
                self.move(slot, self.slots.slot_bytes(slot), DOOMED)
            else:
                self._free(slot, unassigned)
        self._tell(slots, unassigned, out)

    def unlink(self, slot: int, reason: str) -> NamespacePages:
        """Take a COMMITTED page out of the index and the orders of eviction."""
        pages, key = self.index.namespace(self.facts.namespace[slot]), self.key_of(slot)
        del pages.committed[key]
        pages.page_bytes -= self.facts.length_bytes[slot]
        pages.gone[reason] += 1
        self.removed.note(pages.number, key, REASON_NUMBERS[reason], self.now_s)
        if self.on_change is not None:
            self.on_change(pages.number, key)
        if pages.is_kept:
            self.kept[self.slots.slab_of(slot)] -= 1
        order = pages.orders[self.slots.slot_bytes(slot)]
        is_aside = slot in self.aside
        self.aside.discard(slot)
        if reason in ("ttl", "dropped"):
            if not is_aside:
                order.on_remove(slot)
        else:
            if not is_aside:
                order.on_evict(slot, key)
            self.evictions += 1
            if self.on_evict is not None:
                self.on_evict(slot)
        if pages.expiry is not None:
            pages.expiry.on_remove(slot)
        if pages.kin is not None:
            pages.kin.remove(key, slot)
        return pages

    def kin_of(self, victims: Sequence[int]) -> list[int]:
        """The slots of pages that nobody can use once these COMMITTED pages are evicted: see index.py."""
        found: dict[int, None] = {}
        for slot in victims:
            pages, key = self.index.namespace(self.facts.namespace[slot]), self.key_of(slot)
            if pages.kin is not None and not (self.in_tier is not None and self.in_tier(pages.number, key)):
                found.update(dict.fromkeys(pages.kin.of(key)))
        for slot in victims:
            found.pop(slot, None)
        return list(found)

    def wipe_when_free(self, slots: npt.NDArray[np.int64]) -> None:
        """The bytes of these slots, none of them FREE, must not outlast their pages."""
        np.frombuffer(self.to_wipe, np.uint8)[slots] = 1
        self.wiping = int(np.frombuffer(self.to_wipe, np.uint8).sum(dtype=np.int64))

    def slots_of(self, namespace: int) -> npt.NDArray[np.int64]:
        """All of the namespace's slots, whatever their states. 1 ms for a million slots in the arena."""
        owned = np.frombuffer(self.facts.namespace, np.uint32) == namespace
        return np.flatnonzero(owned & (np.frombuffer(self.states, np.uint8) != FREE))

    def free(self, slots: Sequence[int], out: list[Action]) -> None:
        """Free slots that count for their namespaces and hold no page."""
        unassigned: list[int] = []
        for slot in slots:
            self._free(slot, unassigned)
        self._tell(slots, unassigned, out)

    def _free(self, slot: int, unassigned: list[int]) -> None:
        slot_bytes = self.slots.slot_bytes(slot)
        pages = self.index.get(self.facts.namespace[slot])
        if pages is not None:
            pages.slot_bytes -= slot_bytes
        self._release(slot, slot_bytes, unassigned)

    def _release(self, slot: int, slot_bytes: int, unassigned: list[int]) -> None:
        self.move(slot, slot_bytes, FREE)
        self.facts.key[slot] = None
        if self.wiping and self.to_wipe[slot]:
            self.to_wipe[slot], self.wiping = 0, self.wiping - 1
            self.residue.wiped(slot)
            start = self.slots.offset(slot)
            self._wipes.append((start, start + slot_bytes))
        if self.slots.free(slot):
            slab = self.slots.slab_of(slot)
            self.slab_use.remove(slot_bytes, slab)
            unassigned.append(slab)

    # --- sweeping: slots of a cleared namespace

    def sweep(self, sweep: Sweep, slot_bytes: int | None, out: list[Action]) -> bool:
        """Free some slots of a class, or of any class. False when the sweep has none."""
        size, slots = sweep.take(slot_bytes)
        unassigned: list[int] = []
        for slot in slots:
            del sweep.slot_of[self.key_of(slot)]
            self._release(slot, size, unassigned)
        self._end_if_done(sweep)
        self._tell(slots, unassigned, out)
        return bool(slots)

    def sweep_slots(self, slots: Sequence[int], out: list[Action]) -> None:
        """Free these SWEEPING slots."""
        unassigned: list[int] = []
        for slot in slots:
            key, slot_bytes = self.key_of(slot), self.slots.slot_bytes(slot)
            sweep = next(sweep for sweep in self.sweeps if sweep.slot_of.get(key) == slot)
            del sweep.slot_of[key]
            sweep.orders[slot_bytes].on_remove(slot)
            self._end_if_done(sweep)
            self._release(slot, slot_bytes, unassigned)
        self._tell(slots, unassigned, out)

    def _end_if_done(self, sweep: Sweep) -> None:
        if not sweep.slot_of:
            self.sweeps.remove(sweep)

    def _tell(self, slots: Sequence[int], unassigned: Sequence[int], out: list[Action]) -> None:
        """The rows of these slots are free, then these slabs unassigned."""
        wipes, self._wipes = self._wipes, []
        if slots:
            out.append(FreeRows(list(slots), wipes))
        out.extend(AssignSlab(slab, 0) for slab in unassigned)
