"""The pages of a node: the states of slots, eviction, accounting. Pure; appends its table updates to `out`.

    from          to            by
    FREE          RESERVED      reserve
    COMMITTED     RESERVED      reserve: evicted, and its slot filled anew
    RESERVED      COMMITTED     commit
    RESERVED      FREE          give_back: aborted, failed, or the writer is gone and nothing writes any more
    RESERVED      QUARANTINED   quarantine: the page can never be committed, but somebody may still be writing
    QUARANTINED   FREE          give_back: now nobody is
    COMMITTED     FREE          dropped, expired or evicted while nobody held it
    COMMITTED     SWEEPING      cleared with its whole namespace (sweeping.py)
    SWEEPING      FREE          swept: by `tick`, or by a reservation that needs the room
    COMMITTED     DOOMED        dropped while held: found by nobody new, bytes stay for those who hold it
    DOOMED        FREE          the last holder let go

Only COMMITTED pages are found by key. `holds` counts who is reading a slot; a held slot is neither evicted
nor freed. At all times, in bytes of slots: free + used + reserved + quarantined = capacity, where used is
COMMITTED and DOOMED, and free includes SWEEPING, unassigned slabs and tails; `conservation.check` recounts
it.

Space is found in this order: a free slot of the class; an unassigned slab; slots to be swept; the slab of
another class that was not used for longer than our own best victim (so that classes share the arena by
recency); our own best victim. A namespace at its quota evicts its own pages first, and gets no slot beyond
it.

What one request may do to others is bounded: it drops at most `max_drops` pages to make room, then it is told
that the node is full.

A page of a namespace with a time to live ends that long after its commit, read or not: from then on it is not
found (`NamespacePages.lookup`); its slot is freed by `tick`, a little later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import islice, takewhile
from typing import Final

import numpy as np
import numpy.typing as npt

from pdserve.errors import ConfigError
from pdserve.kvpool.core.events import Action, AssignSlab, CommitRows, ReserveRows, free_row
from pdserve.kvpool.core.store.index import NONE, Facts, Index, NamespacePages
from pdserve.kvpool.core.store.lazy_free import CHUNK_SLOTS, Sweep
from pdserve.kvpool.core.store.residue import Residue
from pdserve.kvpool.core.store.slab_recency import SlabUse
from pdserve.kvpool.core.store.slot_allocator import SlotAllocator
from pdserve.kvpool.core.store.victims import best_victims, reorder
from pdserve.kvpool.policies import check_policy
from pdserve.kvpool.policies.base import Links
from pdserve.kvpool.policies.ttl import Ttl

FREE: Final = 0
RESERVED: Final = 1
COMMITTED: Final = 2
DOOMED: Final = 3
QUARANTINED: Final = 4
SWEEPING: Final = 5

MAX_DROPS: Final = 4096  # and a slab
BETWEEN_CHUNKS_S: Final = 0.002  # for other work
EXPIRY_SLACK_S: Final = 0.25  # pages that end within this time are freed together


class PageStore:
    """All slots of one arena. `first_sequence` must exceed every sequence that an earlier incarnation used.

    `next_work_s`: when `tick` should be called; infinite when there is nothing to do.
    """

    def __init__(self, slots: SlotAllocator, first_sequence: int) -> None:
        self.slots = slots
        self.index = Index()
        self.facts = Facts(slots.slots)
        self.states = bytearray(slots.slots)
        self.bytes_in_state = [slots.capacity_bytes, 0, 0, 0, 0, 0]
        self.held: dict[int, int] = {}
        self.slab_use = SlabUse(slots)
        self.residue = Residue(slots)
        self.sweeps: list[Sweep] = []
        self.links = Links(slots.slots)
        self.next_sequence = first_sequence
        self.uses = 0  # counts insertions and hits: the time scale of last_use
        self.evictions = 0
        self.on_evict: Callable[[int], None] | None = None  # called with the slot of a page that goes
        self.next_work_s = float("inf")
        self.max_drops = MAX_DROPS + slots.slots_per_slab
        self._drops_left = self.max_drops
        self._over_quota: set[int] = set()  # namespaces whose quota was lowered below what they have

    @cached_property
    def expiry_links(self) -> Links:
        """Links of the lists of pages that end by themselves."""
        return Links(self.slots.slots)

    # --- looking

    def find(self, namespace: int, key: bytes) -> int:
        """The slot of a committed page, or NONE. It may have ended: see `NamespacePages.lookup`."""
        return self.index.find(namespace, key)

    def state(self, slot: int) -> int:
        return self.states[slot]

    def holds(self, slot: int) -> int:
        """How many hold the slot."""
        return self.held.get(slot, 0)

    def slots_in_state(self, state: int) -> list[int]:
        """Ascending. Slow: for tests."""
        return [slot for slot, found in enumerate(self.states) if found == state]

    def committed_slots(self, start: int, limit: int, namespace: int | None = None) -> npt.NDArray[np.int64]:
        """The first `limit` slots of committed pages from `start` on, of one namespace or of all."""
        found = np.frombuffer(self.states, np.uint8)[start:] == COMMITTED
        if namespace is not None:
            found &= np.frombuffer(self.facts.namespace, np.uint32)[start:] == namespace
        return np.flatnonzero(found)[:limit] + start

    @property
    def free_bytes(self) -> int:
        """What reservations may take without evicting anything."""
        return self.bytes_in_state[FREE] + self.bytes_in_state[SWEEPING]

    # --- writing

    def start_request(self) -> None:
        """A request begins: it may drop `max_drops` pages."""
        self._drops_left = self.max_drops

    def take(
        self,
        pages: NamespacePages,
        keys: Sequence[bytes],
        length_bytes: int,
        slot_bytes: int,
        out: list[Action],
    ) -> list[int]:
        """Reserve slots of the class `slot_bytes`, which is that of `length_bytes`, for different keys that
        are neither committed nor being written; when there is no room for all, for the first ones.
        """
        if pages.expiry is not None:
            for ended in [pages.committed[key] for key in keys if key in pages.committed]:
                self.drop(ended, out, "ttl")
        slots = self._find_room(slot_bytes, self._within_quota(pages, slot_bytes, len(keys), out), out)
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
        keys = [self._key(slot) for slot in slots]
        lengths = [facts.length_bytes[slot] for slot in slots]
        spaces = []
        namespace = slot_bytes = NONE
        committed_bytes = 0
        for slot, key, length_bytes, checksum in zip(slots, keys, lengths, checksums, strict=True):
            if namespace_of[slot] != namespace or slab_class[slot // slots_per_slab] != slot_bytes:
                namespace, slot_bytes = namespace_of[slot], slab_class[slot // slots_per_slab]
                pages = self.index.namespace(namespace)
                on_insert = pages.order(slot_bytes, self.links).on_insert
            del pages.writing[key]
            pages.committed[key] = slot
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
        sequences = [facts.sequence[slot] for slot in slots]
        out.append(CommitRows(slots, keys, spaces, lengths, checksums, sequences, now_s))

    def quarantine(self, slot: int) -> None:
        """A RESERVED page will not be committed; its key is free to be reserved again, its slot is not."""
        del self.index.namespace(self.facts.namespace[slot]).writing[self._key(slot)]
        self._move(slot, self.slots.slot_bytes(slot), QUARANTINED)

    def give_back(self, slot: int, out: list[Action]) -> None:
        """Free a RESERVED or QUARANTINED slot."""
        if self.states[slot] == RESERVED:
            del self.index.namespace(self.facts.namespace[slot]).writing[self._key(slot)]
        self._free(slot, out)

    # --- reading

    def touch(self, pages: NamespacePages, slot_bytes: int, slots: list[int], now_s: float) -> None:
        """Pages of `pages` were read, of one class."""
        on_hit = pages.orders[slot_bytes].on_hit
        for slot in slots:
            on_hit(slot, now_s)
        self.uses = self.slab_use.use(slots, self.facts.last_use, self.uses)

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
            self._free(slot, out)

    # --- dropping

    def drop(self, slot: int, out: list[Action], reason: str = "dropped") -> None:
        """A COMMITTED page is found no more, from now on; its slot is freed when nobody holds it."""
        self._unlink(slot, reason)
        if slot in self.held:
            self._move(slot, self.slots.slot_bytes(slot), DOOMED)
            free_row(slot, out)  # not recovered after a crash, and readers' own check fails
        else:
            self._free(slot, out)

    def clear(self, namespace: int, space: int, out: list[Action]) -> int:
        """Drop every page of the namespace, however many, in one look at all slots' states (1 ms for a
        million slots); how many. `space` is what its rows carry from now on, used by no row before.
        """
        pages = self.index.namespace(namespace)
        count = len(pages.committed)
        for slot in [slot for slot in self.held if self.facts.namespace[slot] == namespace]:
            if self.states[slot] == COMMITTED:
                self.drop(slot, out)
        states = np.frombuffer(self.states, np.uint8)
        owned = np.frombuffer(self.facts.namespace, np.uint32) == namespace
        states[owned & (states == COMMITTED)] = SWEEPING
        sweep = Sweep(pages.committed, pages.orders)
        pages.gone["dropped"] += len(pages.committed)
        pages.committed, pages.orders, pages.page_bytes, pages.space = {}, {}, 0, space
        if pages.expiry is not None:
            pages.expiry = Ttl(self.expiry_links, pages.expiry.ttl_s)
        swept_bytes = sweep.bytes_left
        pages.slot_bytes -= swept_bytes
        self.bytes_in_state[COMMITTED] -= swept_bytes
        self.bytes_in_state[SWEEPING] += swept_bytes
        if swept_bytes:
            self.sweeps.append(sweep)
            if len(sweep.slot_of) <= CHUNK_SLOTS:
                while sweep.slot_of:
                    self._sweep(sweep, None, out)
            else:
                self.next_work_s = 0.0
        return count

    def forget(self, namespace: int) -> None:
        """The namespace is dropped, and has neither pages nor reservations left."""
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
    ) -> None:
        """Set how the namespace's pages are evicted, when they end, and how many bytes of slots it may have
        in all, reservations included. Pages that are there get their place in a new order at once (0.2 s
        for a million); what is beyond a lowered quota goes little by little. Raises ConfigError.
        """
        check_policy(policy, ttl_s)
        if quota_bytes is not None and quota_bytes < 0:
            raise ConfigError(f"quota_bytes is {quota_bytes}: it must be 0 or more, or absent for no quota")
        pages = self.index.namespace(namespace)
        changed = (pages.policy, pages.ttl_s) != (policy, ttl_s)
        pages.policy, pages.quota_bytes = policy, quota_bytes
        if changed:
            pages.expiry = None if ttl_s is None else Ttl(self.expiry_links, ttl_s)
            slots = np.fromiter(pages.committed.values(), np.int64, len(pages.committed))
            last_use = np.frombuffer(self.facts.last_use, np.uint64)[slots]
            self.reorder(pages, slots[np.argsort(last_use, kind="stable")])
        if quota_bytes is not None and pages.slot_bytes > quota_bytes:
            self._over_quota.add(namespace)
            self.next_work_s = 0.0

    def reorder(self, pages: NamespacePages, by_use: npt.NDArray[np.int64]) -> None:
        """Make the namespace's orders anew; `by_use` are all of its committed pages, unused for longest
        first.
        """
        reorder(pages, by_use, self.facts, self.slots, self.links)
        if pages.expiry is not None:
            self._expect(pages.expiry.next_end_s + EXPIRY_SLACK_S)

    def tick(self, now_s: float, out: list[Action]) -> None:
        """A little of what can wait: pages that ended, pages beyond a lowered quota, slots to be swept."""
        self.next_work_s = float("inf")
        for pages in self.index:
            if pages.expiry is not None:
                for slot in list(islice(pages.expiry.ended(now_s), CHUNK_SLOTS)):
                    self.drop(slot, out, "ttl")
                self._expect(max(pages.expiry.next_end_s + EXPIRY_SLACK_S, now_s + BETWEEN_CHUNKS_S))
        for namespace in list(self._over_quota):
            pages = self.index.namespace(namespace)
            self._drops_left = CHUNK_SLOTS
            quota = pages.quota_bytes
            if quota is None or self._fit_quota(pages, quota, out) or self._drops_left:
                self._over_quota.discard(namespace)
        if self.sweeps:
            self._sweep(self.sweeps[0], None, out)
        if self.sweeps or self._over_quota:
            self._expect(now_s + BETWEEN_CHUNKS_S)

    # --- room

    def _find_room(self, slot_bytes: int, count: int, out: list[Action]) -> list[int]:
        """Up to `count` slots of a class; some as they were when their pages were evicted: RESERVED will
        follow COMMITTED in their rows.
        """
        slots = self.slots.allocate(slot_bytes, count)
        while len(slots) < count:
            if self.sweeps and not self.slots.has_unassigned and self._sweep_for(slot_bytes, out):
                pass
            elif self.slots.has_unassigned:
                slab = self.slots.assign(slot_bytes)
                self.slab_use.add(slot_bytes, slab, self.uses)
                self.residue.assigned(slab)
                out.append(AssignSlab(slab, slot_bytes))
            else:
                evicted = self._evict(slot_bytes, count - len(slots), out)
                slots += evicted
                if not evicted and not self.slots.has_unassigned:
                    break
            slots += self.slots.allocate(slot_bytes, count - len(slots))
        return slots

    def _evict(self, slot_bytes: int, count: int, out: list[Action]) -> list[int]:
        """Evict up to `count` pages of the class and return their slots; none where a slab of another class,
        unused for longer than the first of them, is emptied instead, or where nothing can go.
        """
        victims = best_victims(self.index.orders(slot_bytes), self.facts, self.held, count)
        if self.slab_use.other_classes(slot_bytes) and self._drops_left >= self.slots.slots_per_slab:
            slab, use = self.slab_use.coldest(slot_bytes, self._is_idle)
            if slab != NONE:
                last_use = self.facts.last_use
                victims = list(takewhile(lambda victim: last_use[victim] <= use, victims))
                if not victims:
                    self._empty(slab, out)
        for victim in victims:
            self._unlink(victim, "capacity").slot_bytes -= slot_bytes
        return victims

    def _within_quota(self, pages: NamespacePages, slot_bytes: int, count: int, out: list[Action]) -> int:
        """How many more slots, up to `count`, the namespace may have; it evicts its own pages for them."""
        if pages.quota_bytes is None:
            return count
        count = min(count, pages.quota_bytes // slot_bytes)
        if count:
            self._fit_quota(pages, pages.quota_bytes - count * slot_bytes, out)
        return max(0, min(count, (pages.quota_bytes - pages.slot_bytes) // slot_bytes))

    def _fit_quota(self, pages: NamespacePages, quota_bytes: int, out: list[Action]) -> bool:
        """Evict the namespace's own pages until it has `quota_bytes` at most; whether that is so."""
        while pages.slot_bytes > quota_bytes and self._drops_left > 0:
            # never more than needed, should all be of the largest class
            count = -(-(pages.slot_bytes - quota_bytes) // max(pages.orders, default=1))
            victims = best_victims(pages.orders.values(), self.facts, self.held, min(count, self._drops_left))
            if not victims:
                return False
            self._drops_left -= len(victims)
            for victim in victims:
                self.drop(victim, out, "quota")
        return pages.slot_bytes <= quota_bytes

    def _empty(self, slab: int, out: list[Action]) -> None:
        """Free all slots of an idle slab, which is unassigned then."""
        start = slab * self.slots.slots_per_slab
        for slot in range(start, start + self.slots.slots_per_slab):
            self._drops_left -= self.states[slot] != FREE
            if self.states[slot] == COMMITTED:
                self.drop(slot, out, "slab")
            elif self.states[slot] == SWEEPING:
                self._sweep_slot(slot, out)

    def _is_idle(self, slab: int) -> bool:
        """Whether nobody reads or writes in the slab."""
        start = slab * self.slots.slots_per_slab
        end = start + self.slots.slots_per_slab
        states = self.states[start:end]
        if RESERVED in states or QUARANTINED in states:
            return False
        return self.held.keys().isdisjoint(range(start, end))

    # --- sweeping

    def _sweep_for(self, slot_bytes: int, out: list[Action]) -> bool:
        """Free slots of the class from what is to be swept; False when there are none: then a slab may be
        unassigned.
        """
        for sweep in list(self.sweeps):
            if self._sweep(sweep, slot_bytes, out):
                return True
        while self.sweeps and not self.slots.has_unassigned and self._drops_left > 0:
            self._drops_left -= CHUNK_SLOTS
            self._sweep(self.sweeps[0], None, out)
        return False

    def _sweep(self, sweep: Sweep, slot_bytes: int | None, out: list[Action]) -> bool:
        """Free some slots, of a class or of any; whether there were any."""
        size, slots = sweep.take(slot_bytes)
        for slot in slots:
            del sweep.slot_of[self._key(slot)]
            self._release(slot, size, out)
        if not sweep.slot_of:
            self.sweeps.remove(sweep)
        return bool(slots)

    def _sweep_slot(self, slot: int, out: list[Action]) -> None:
        """Free one slot that is to be swept."""
        key, slot_bytes = self._key(slot), self.slots.slot_bytes(slot)
        sweep = next(sweep for sweep in self.sweeps if sweep.slot_of.get(key) == slot)
        del sweep.slot_of[key]
        sweep.orders[slot_bytes].on_remove(slot)
        if not sweep.slot_of:
            self.sweeps.remove(sweep)
        self._release(slot, slot_bytes, out)

    # --- states

    def _move(self, slot: int, slot_bytes: int, state: int) -> None:
        in_state, states = self.bytes_in_state, self.states
        in_state[states[slot]] -= slot_bytes
        in_state[state] += slot_bytes
        states[slot] = state

    def _unlink(self, slot: int, reason: str) -> NamespacePages:
        """Take a COMMITTED page out of index and orders."""
        pages, key = self.index.namespace(self.facts.namespace[slot]), self._key(slot)
        del pages.committed[key]
        pages.page_bytes -= self.facts.length_bytes[slot]
        pages.gone[reason] += 1
        order = pages.orders[self.slots.slot_bytes(slot)]
        if reason in ("ttl", "dropped"):
            order.on_remove(slot)
        else:
            order.on_evict(slot, key)
            self.evictions += 1
            if self.on_evict is not None:
                self.on_evict(slot)
        if pages.expiry is not None:
            pages.expiry.on_remove(slot)
        return pages

    def _free(self, slot: int, out: list[Action]) -> None:
        slot_bytes = self.slots.slot_bytes(slot)
        pages = self.index.get(self.facts.namespace[slot])
        if pages is not None:
            pages.slot_bytes -= slot_bytes
        self._release(slot, slot_bytes, out)

    def _release(self, slot: int, slot_bytes: int, out: list[Action]) -> None:
        self._move(slot, slot_bytes, FREE)
        self.facts.key[slot] = None
        free_row(slot, out)
        if self.slots.free(slot):
            slab = self.slots.slab_of(slot)
            self.slab_use.remove(slot_bytes, slab)
            out.append(AssignSlab(slab, 0))

    def _key(self, slot: int) -> bytes:
        key = self.facts.key[slot]
        assert key is not None
        return key

    def _expect(self, work_s: float) -> None:
        self.next_work_s = min(self.next_work_s, work_s)
