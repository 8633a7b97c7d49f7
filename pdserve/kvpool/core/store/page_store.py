"""The pages of a node: reserved, committed, read, dropped; expiry and quotas. Pure; appends to `out`.

slot_states.py has the states of slots and says how one becomes another. room.py finds room for reservations.

A page of a namespace with a time to live expires that long after its commit, read or not. From then on no
lookup finds it (`NamespacePages.lookup`). `tick` frees its slot a little later.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt

from pdserve.errors import ConfigError
from pdserve.kvpool.core.events import Action, CommitRows, ReserveRows
from pdserve.kvpool.core.store import lazy_free
from pdserve.kvpool.core.store.index import NONE, Family, Kin, NamespacePages
from pdserve.kvpool.core.store.lazy_free import CHUNK_SLOTS, Sweep
from pdserve.kvpool.core.store.room import MAX_DROPS, DropBudget, Room, reorder
from pdserve.kvpool.core.store.slot_allocator import SlotAllocator
from pdserve.kvpool.core.store.slot_states import SlotStates
from pdserve.kvpool.policies import check_policy
from pdserve.kvpool.policies.base import Links
from pdserve.kvpool.policies.orders import Ttl
from pdserve.kvpool.protocol.slot_table import COMMITTED, QUARANTINED, RESERVED, SWEEPING

BETWEEN_CHUNKS_S: Final = 0.002  # other requests are served meanwhile
EXPIRY_SLACK_S: Final = 0.25  # pages that expire within this time are freed together


class PageStore(SlotStates):
    """All pages of one arena. `first_sequence` must exceed every sequence that an earlier incarnation used.

    `next_work_s` is when `tick` should be called; infinite when there is nothing to do.
    """

    def __init__(self, slots: SlotAllocator, first_sequence: int) -> None:
        super().__init__(slots)
        self.next_sequence = first_sequence
        self.next_work_s = float("inf")
        self.max_drops = MAX_DROPS + slots.slots_per_slab
        self._room = Room(self)
        self._over_quota: set[int] = set()  # namespaces that have more than a quota that was lowered

    @cached_property
    def expiry_links(self) -> Links:
        """Links of the lists of pages that expire."""
        return Links(self.slots.slots)

    # --- writing

    def drop_budget(self) -> DropBudget:
        """What one request may drop to make room."""
        return DropBudget(self.max_drops)

    def take(
        self,
        pages: NamespacePages,
        keys: Sequence[bytes],
        length_bytes: int,
        slot_bytes: int,
        out: list[Action],
        budget: DropBudget | None = None,
    ) -> list[int]:
        """Reserve slots of class `slot_bytes` for pages of `length_bytes`. Where there is no room for all
        keys, the first ones get slots. The keys differ, and are neither committed nor being written.

        `budget` is what the request may still drop. Without one, this call is the whole request.
        """
        budget = budget or self.drop_budget()
        if pages.expiry is not None:
            self.drop([pages.committed[key] for key in keys if key in pages.committed], out, "ttl")
        count = self._room.within_quota(pages, slot_bytes, len(keys), budget, out)
        slots = self._room.find(slot_bytes, count, budget, out)
        facts, states, in_state, sequence = self.facts, self.states, self.bytes_in_state, self.next_sequence
        key_of, namespace_of, length_of = facts.key, facts.namespace, facts.length_bytes
        sequence_of, number, writing = facts.sequence, pages.number, pages.writing
        for slot, key in zip(slots, keys, strict=False):
            key_of[slot] = key
            namespace_of[slot] = number
            length_of[slot] = length_bytes
            sequence_of[slot] = sequence
            sequence += 1
            writing[key] = slot
            in_state[states[slot]] -= slot_bytes
            states[slot] = RESERVED
        self.next_sequence = sequence
        in_state[RESERVED] += slot_bytes * len(slots)
        pages.slot_bytes += slot_bytes * len(slots)
        if slots:
            out.append(ReserveRows(slots, pages.space, self.residue.take(slots, number)))
        return slots

    def commit(self, slots: list[int], checksums: list[int], now_s: float, out: list[Action]) -> None:
        """Make RESERVED pages readable."""
        facts, states, slots_per_slab = self.facts, self.states, self.slots.slots_per_slab
        namespace_of, slab_class = facts.namespace, self.slots.slab_class
        checksum_of, committed_s = facts.checksum, facts.committed_s
        keys = [self.key_of(slot) for slot in slots]
        lengths = [facts.length_bytes[slot] for slot in slots]
        spaces = []
        namespace = slot_bytes = NONE
        committed_bytes = 0
        for slot, key, length_bytes, checksum in zip(slots, keys, lengths, checksums, strict=True):
            if namespace_of[slot] != namespace or slab_class[slot // slots_per_slab] != slot_bytes:
                namespace, slot_bytes = namespace_of[slot], slab_class[slot // slots_per_slab]
                pages = self.index.namespace(namespace)
                on_insert = pages.order(slot_bytes, self.links).on_insert
                is_kept = pages.is_kept
            del pages.writing[key]
            pages.committed[key] = slot
            if pages.kin is not None:
                pages.kin.add(key, slot)
            if is_kept:
                self.kept[slot // slots_per_slab] += 1
            pages.page_bytes += length_bytes
            pages.written += 1
            pages.written_bytes += length_bytes
            checksum_of[slot] = checksum
            committed_s[slot] = now_s
            committed_bytes += slot_bytes
            states[slot] = COMMITTED
            on_insert(slot, key, now_s)
            if pages.expiry is not None:
                pages.expiry.on_insert(slot, key, now_s)
                self._expect(pages.expiry.next_end_s + EXPIRY_SLACK_S)
            spaces.append(pages.space)
        self.bytes_in_state[RESERVED] -= committed_bytes
        self.bytes_in_state[COMMITTED] += committed_bytes
        self.uses = self.slab_use.use(slots, facts.last_use, self.uses)
        if self.on_change is not None:
            for slot, key in zip(slots, keys, strict=True):
                self.on_change(namespace_of[slot], key)
        sequences = [facts.sequence[slot] for slot in slots]
        out.append(CommitRows(slots, keys, spaces, lengths, checksums, sequences, now_s))

    def quarantine(self, slot: int) -> None:
        """A RESERVED page will not be committed. Its key may be reserved again, its slot may not."""
        del self.index.namespace(self.facts.namespace[slot]).writing[self.key_of(slot)]
        self.move(slot, self.slots.slot_bytes(slot), QUARANTINED)

    def give_back(self, slots: Sequence[int], out: list[Action]) -> None:
        """Free RESERVED or QUARANTINED slots."""
        for slot in slots:
            if self.states[slot] == RESERVED:
                del self.index.namespace(self.facts.namespace[slot]).writing[self.key_of(slot)]
        self.free(slots, out)

    # --- reading

    def touch(self, pages: NamespacePages, slot_bytes: int, slots: list[int], now_s: float) -> None:
        """Pages of one namespace and class were read."""
        on_hit = pages.orders[slot_bytes].on_hit
        for slot in self.aside.intersection(slots) if self.aside else ():
            self.put_back(slot)
        for slot in slots:
            on_hit(slot, now_s)
        self.uses = self.slab_use.use(slots, self.facts.last_use, self.uses)

    def demote(self, slots: Sequence[int]) -> None:
        """These committed pages are to be evicted before others, the last one first."""
        for slot in slots:
            order = self.put_back(slot) if slot in self.aside else self._order_of(slot)
            order.on_demote(slot)
            self.facts.last_use[slot] = 0

    # --- dropping

    def clear(self, namespace: int, space: int, out: list[Action], *, erases: bool = False) -> int:
        """Drop every page of the namespace, in one step over all slots' states (1 ms for a million slots).
        The number of pages. Rows carry `space` from now on, a number that no row had before. `erases`: the
        slots are to be wiped (`wipe_when_free`), so fewer are freed at a time.
        """
        pages = self.index.namespace(namespace)
        count = len(pages.committed)
        held = [slot for slot in self.held if self.facts.namespace[slot] == namespace]
        self.drop([slot for slot in held if self.states[slot] == COMMITTED], out)
        states = np.frombuffer(self.states, np.uint8)
        owned = np.frombuffer(self.facts.namespace, np.uint32) == namespace
        states[owned & (states == COMMITTED)] = SWEEPING
        sweep = Sweep(pages.committed, pages.orders, erases=erases)
        pages.gone["dropped"] += len(pages.committed)
        pages.committed, pages.orders, pages.page_bytes, pages.space = {}, {}, 0, space
        if count and self.on_change is not None:
            self.on_change(namespace, None)
        if pages.is_kept:
            self._count_kept()
        if pages.expiry is not None:
            pages.expiry = Ttl(self.expiry_links, pages.expiry.ttl_s)
        if pages.kin is not None:
            pages.kin = Kin(self.facts.key)
        swept_bytes = sweep.bytes_left
        pages.slot_bytes -= swept_bytes
        self.bytes_in_state[COMMITTED] -= swept_bytes
        self.bytes_in_state[SWEEPING] += swept_bytes
        if swept_bytes:
            self.sweeps.append(sweep)
            if len(sweep.slot_of) <= CHUNK_SLOTS and not (erases and swept_bytes > lazy_free.ERASED_BYTES):
                while sweep.slot_of:
                    self.sweep(sweep, None, out)
            else:
                self.next_work_s = 0.0
        return count

    def forget(self, namespace: int) -> None:
        """Remove a dropped namespace without pages and reservations."""
        self.index.forget(namespace)
        self._over_quota.discard(namespace)

    # --- bounds of a namespace

    def configure_namespace(
        self,
        namespace: int,
        *,
        policy: str = "lru",
        ttl_s: float | None = None,
        quota_bytes: int | None = None,
        family: Family | None = None,
    ) -> None:
        """Set the namespace's order of eviction, the time to live of its pages, and the bytes of slots that
        it may have, reservations included. `family`: with whom it shares further quotas. Existing pages are
        ordered anew at once (0.2 s for a million); `tick` evicts pages beyond a lowered quota. Raises
        ConfigError.
        """
        check_policy(policy, ttl_s)
        if quota_bytes is not None and quota_bytes < 0:
            raise ConfigError(f"quota_bytes is {quota_bytes}: it must be 0 or more, or absent for no quota")
        pages = self.index.namespace(namespace)
        changed = (pages.policy, pages.ttl_s) != (policy, ttl_s)
        pages.policy, pages.quota_bytes = policy, quota_bytes
        if family is not None and pages.family is None:
            pages.family = family
            family.members.append(pages)
        if changed:
            pages.expiry = None if ttl_s is None else Ttl(self.expiry_links, ttl_s)
            slots = np.fromiter(pages.committed.values(), np.int64, len(pages.committed))
            last_use = np.frombuffer(self.facts.last_use, np.uint64)[slots]
            self.reorder(pages, slots[np.argsort(last_use, kind="stable")])
        bounds: list[NamespacePages | Family] = [pages] if pages.family is None else [pages, pages.family]
        if any(one.quota_bytes is not None and one.slot_bytes > one.quota_bytes for one in bounds):
            self._over_quota.add(namespace)
            self.next_work_s = 0.0

    def relate(self, namespace: int) -> None:
        """Pages of the namespace have several parts. Called before it has any page."""
        pages = self.index.namespace(namespace)
        if pages.kin is None:
            pages.kin = Kin(self.facts.key)

    def reorder(self, pages: NamespacePages, by_use: npt.NDArray[np.int64]) -> None:
        """Make the namespace's orders anew. `by_use`: its committed pages, the least recently used first."""
        self.aside.difference_update(pages.committed.values() if self.aside else ())
        reorder(pages, by_use, self.facts, self.slots, self.links)
        self._count_kept()
        if pages.expiry is not None:
            self._expect(pages.expiry.next_end_s + EXPIRY_SLACK_S)

    def tick(self, now_s: float, out: list[Action]) -> None:
        """Some of the work that can wait: expired pages, pages beyond a lowered quota, SWEEPING slots."""
        self.next_work_s = float("inf")
        for pages in self.index:
            if pages.expiry is not None:
                self.drop(list(islice(pages.expiry.ended(now_s), CHUNK_SLOTS)), out, "ttl")
                self._expect(max(pages.expiry.next_end_s + EXPIRY_SLACK_S, now_s + BETWEEN_CHUNKS_S))
        for namespace in list(self._over_quota):
            pages = self.index.namespace(namespace)
            if self._room.fits(pages, DropBudget(CHUNK_SLOTS), out):
                self._over_quota.discard(namespace)
        if self.sweeps:
            self.sweep(self.sweeps[0], None, out)
        if self.sweeps or self._over_quota:
            self._expect(now_s + BETWEEN_CHUNKS_S)

    def _count_kept(self) -> None:
        """Count the pages in each slab that are never evicted."""
        kept = np.frombuffer(self.kept, np.uint32)
        kept[:] = 0
        for pages in self.index:
            if pages.is_kept:
                slots = np.fromiter(pages.committed.values(), np.int64, len(pages.committed))
                kept += np.bincount(slots // self.slots.slots_per_slab, minlength=len(kept)).astype(np.uint32)

    def _expect(self, work_s: float) -> None:
        self.next_work_s = min(self.next_work_s, work_s)
