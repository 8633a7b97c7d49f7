"""Making room for a reservation. Pure.

Room is taken in this order:

1. a free slot of the size class;
2. an unassigned slab;
3. SWEEPING slots (their bytes count as free);
4. the coldest slab of another class, if it was not used for longer than our own best victim: so classes share
   the arena by recency;
5. our own best victim.

A victim takes along the parts of its page that nobody can use without it (index.py).
A namespace at its quota evicts its own pages first, and gets no slot beyond the quota. So does a model with
all of its tenants.
Pages that are kept (policy "keep") are never evicted, and their slabs are not emptied.

A request may harm others only so far: it drops `MAX_DROPS` pages and a slab at most (its `DropBudget`). After
that it finds no more room, and the client is told that the node is full. It also passes `MAX_SKIPPED` held
pages at most; those that it passed are in no later request's way.

Victims are chosen over all orders of eviction; here these are rebuilt, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge, nsmallest
from itertools import islice, takewhile
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pdserve.kvpool.core.events import Action, AssignSlab
from pdserve.kvpool.core.store.index import NONE, Facts, Family, NamespacePages
from pdserve.kvpool.core.store.lazy_free import CHUNK_SLOTS
from pdserve.kvpool.core.store.slot_allocator import SlotAllocator
from pdserve.kvpool.core.store.slot_states import SlotStates
from pdserve.kvpool.policies.base import EvictionPolicy, Links
from pdserve.kvpool.protocol.slot_table import COMMITTED, FREE, QUARANTINED, RESERVED, SWEEPING


def best_victims(
    orders: Iterable[EvictionPolicy],
    facts: Facts,
    holds: Collection[int],
    count: int,
    skip: Callable[[list[int]], bool],
) -> list[int]:
    """Up to `count` slots that nobody holds. Each is the least recently used among the best victims of all
    orders. `skip` takes held slots that come before them out of their order, and says whether to look on.
    """
    orders, last_use = list(orders), facts.last_use
    heads = enumerate(orders) if len(orders) > count else ()  # each tenant has orders of its own
    first = [(last_use[slot], n) for n, order in heads for slot in islice(order.victims(), 1)]
    near = [orders[n] for _, n in nsmallest(count, first)]  # the others come to no turn, if nothing is held
    found = _merged(near, last_use, holds, count, skip) if near else []
    return found if len(found) == count else _merged(orders, last_use, holds, count, skip)


def _merged(
    orders: Sequence[EvictionPolicy],
    last_use: Sequence[int],
    holds: Collection[int],
    count: int,
    skip: Callable[[list[int]], bool],
) -> list[int]:
    each = [_free_of(order, holds, count, skip) for order in orders]
    if len(each) == 1:
        return each[0]
    return list(islice(merge(*each, key=last_use.__getitem__), count))


def _free_of(
    order: EvictionPolicy, holds: Collection[int], count: int, skip: Callable[[list[int]], bool]
) -> list[int]:
    while True:
        near = list(islice(order.victims(), count))
        held = [slot for slot in near if slot in holds]
        if not held:
            return near
        if not skip(held):
            return [slot for slot in near if slot not in holds]


def coldest(
    index: Iterable[NamespacePages], count: int
) -> Iterator[tuple[NamespacePages, npt.NDArray[np.int64]]]:
    """About `count` slots that would be evicted first: an equal share of each namespace and class, which is
    one array.
    """
    orders = [(pages, order) for pages in index for order in pages.orders.values() if len(order)]
    for pages, order in orders:
        share = max(16, count // len(orders))
        yield pages, np.fromiter(islice(order.victims(), share), np.int64)


def reorder(
    pages: NamespacePages, by_use: npt.NDArray[np.int64], facts: Facts, slots: SlotAllocator, links: Links
) -> None:
    """Make the namespace's orders anew. `by_use`: its committed pages, the least recently used first."""
    for order in pages.orders.values():
        order.close()
    pages.orders = {}
    committed_s = np.frombuffer(facts.committed_s)
    ordered = by_use
    if pages.policy in ("fifo", "ttl") or pages.expiry is not None:
        sequence = np.frombuffer(facts.sequence, np.uint64)
        by_commit = by_use[np.lexsort((sequence[by_use], committed_s[by_use]))]
        if pages.expiry is not None:
            pages.expiry.restore(by_commit, committed_s[by_commit])
        if pages.policy in ("fifo", "ttl"):
            ordered = by_commit
    classes = np.frombuffer(slots.slab_class, np.uint64)[ordered // slots.slots_per_slab]
    for slot_bytes in distinct(classes):
        mine = ordered[classes == slot_bytes]
        pages.order(slot_bytes, links).restore(mine, committed_s[mine])


def sorted_by(values: npt.NDArray[np.uint64], slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`slots` by ascending `values`; both of one length, slots not negative. Where a value and a slot fit one
    word, words are sorted: a fifth of the time of `argsort`.
    """
    if not len(slots):
        return slots
    above, bits = values - values.min(), int(slots.max()).bit_length()
    if int(above.max()).bit_length() + bits > 64:
        return slots[np.argsort(values, kind="stable")]
    words = np.sort(above << np.uint64(bits) | slots.astype(np.uint64))
    return (words & np.uint64((1 << bits) - 1)).astype(np.int64)


def distinct(values: npt.NDArray[Any]) -> list[int]:
    """The different values, ascending; quick where there is only one."""
    if len(values) and (values == values[0]).all():
        return [int(values[0])]
    found: list[int] = np.unique(values).tolist()
    return found


MAX_DROPS: Final = 4096
MAX_SKIPPED: Final = 2048  # held pages: about 2 ms


@dataclass(slots=True)
class DropBudget:
    """How many more pages one request may drop to make room, and how many held ones it may pass."""

    left: int
    skips: int = MAX_SKIPPED


class Room:
    """Finds slots in an arena."""

    def __init__(self, states: SlotStates) -> None:
        self._states = states
        self._slots = states.slots

    def find(self, slot_bytes: int, count: int, budget: DropBudget, out: list[Action]) -> list[int]:
        """Up to `count` slots of a class. Some are as their evicted pages left them: in their rows RESERVED
        follows COMMITTED.
        """
        states, slots = self._states, self._slots
        found = slots.allocate(slot_bytes, count)
        while len(found) < count:
            if states.sweeps and not slots.has_unassigned and self._sweep(slot_bytes, budget, out):
                pass
            elif slots.has_unassigned:
                slab = slots.assign(slot_bytes)
                states.slab_use.add(slot_bytes, slab, states.uses)
                states.residue.assigned(slab)
                out.append(AssignSlab(slab, slot_bytes))
            else:
                evicted = self._evict(slot_bytes, count - len(found), budget, out)
                found += evicted
                if not evicted and not slots.has_unassigned:
                    break
            found += slots.allocate(slot_bytes, count - len(found))
        return found

    def within_quota(
        self, pages: NamespacePages, slot_bytes: int, count: int, budget: DropBudget, out: list[Action]
    ) -> int:
        """How many more slots, up to `count`, the namespace may have. It evicts its own pages for them, and
        where its family is at its quota, the family's.
        """
        for holder, quota_bytes in _bounds(pages):
            count = min(count, quota_bytes // slot_bytes)
            if count:
                self._fit_quota(holder, quota_bytes - count * slot_bytes, budget, out)
            count = max(0, min(count, (quota_bytes - holder.slot_bytes) // slot_bytes))
        return count

    def fits(self, pages: NamespacePages, budget: DropBudget, out: list[Action]) -> bool:
        """Evict pages of the namespace, and of its family, until both are within their quotas. False: the
        budget was too small for it.
        """
        for holder, quota_bytes in _bounds(pages):
            if not self._fit_quota(holder, quota_bytes, budget, out) and budget.left <= 0:
                return False
        return True

    def _fit_quota(
        self, holder: NamespacePages | Family, quota_bytes: int, budget: DropBudget, out: list[Action]
    ) -> bool:
        """Evict the holder's own pages until it has `quota_bytes` at most. False where it has more."""
        members = holder.members if isinstance(holder, Family) else [holder]
        while holder.slot_bytes > quota_bytes and budget.left > 0:
            orders = [o for pages in members if not pages.is_kept for o in pages.orders.items()]
            # never more than needed, should all be of the largest class
            largest = max((size for size, _ in orders), default=1)
            count = -(-(holder.slot_bytes - quota_bytes) // largest)
            victims = self._victims([order for _, order in orders], min(count, budget.left), budget)
            if not victims:
                return False
            victims += self._kin(victims, budget)
            budget.left -= len(victims)
            self._states.drop(victims, out, "quota")
        return holder.slot_bytes <= quota_bytes

    def _evict(self, slot_bytes: int, count: int, budget: DropBudget, out: list[Action]) -> list[int]:
        """Evict up to `count` pages of the class and return their slots. Returns none where nothing can go,
        or where it emptied a colder slab of another class instead.
        """
        states = self._states
        victims = self._victims(states.index.orders(slot_bytes), count, budget)
        if states.slab_use.other_classes(slot_bytes) and budget.left >= self._slots.slots_per_slab:
            slab, use = states.slab_use.coldest(slot_bytes, self._is_idle)
            if slab != NONE:
                last_use = states.facts.last_use
                victims = list(takewhile(lambda victim: last_use[victim] <= use, victims))
                if not victims:
                    self._empty(slab, budget, out)
        kin = self._kin(victims, budget)
        budget.left -= len(kin)
        for victim in victims:
            states.unlink(victim, "capacity").slot_bytes -= slot_bytes
        states.drop(kin, out, "capacity")
        return victims

    def _victims(self, orders: Iterable[EvictionPolicy], count: int, budget: DropBudget) -> list[int]:
        """See `best_victims`."""

        def skip(held: list[int]) -> bool:
            if budget.skips <= 0:
                return False
            budget.skips -= len(held)
            self._states.set_aside(held)
            return True

        return best_victims(orders, self._states.facts, self._states.held, count, skip)

    def _kin(self, victims: Sequence[int], budget: DropBudget) -> list[int]:
        """What is evicted with them. Parts beyond the budget stay until they are victims themselves."""
        return self._states.kin_of(victims)[: max(0, budget.left - len(victims))]

    def _empty(self, slab: int, budget: DropBudget, out: list[Action]) -> None:
        """Free all slots of an idle slab. The slab is unassigned then."""
        state_of, start = self._states.states, slab * self._slots.slots_per_slab
        taken = [slot for slot in range(start, start + self._slots.slots_per_slab) if state_of[slot] != FREE]
        committed = [slot for slot in taken if state_of[slot] == COMMITTED]
        kin = self._kin(committed, budget)
        budget.left -= len(taken) + len(kin)
        swept = [slot for slot in taken if state_of[slot] == SWEEPING]
        self._states.drop([*committed, *kin], out, "slab")
        self._states.sweep_slots(swept, out)

    def _is_idle(self, slab: int) -> bool:
        """Whether nobody reads or writes in the slab, and no page of it is kept."""
        if self._states.kept[slab]:
            return False
        start = slab * self._slots.slots_per_slab
        end = start + self._slots.slots_per_slab
        states = self._states.states[start:end]
        if RESERVED in states or QUARANTINED in states:
            return False
        return self._states.held.keys().isdisjoint(range(start, end))

    def _sweep(self, slot_bytes: int, budget: DropBudget, out: list[Action]) -> bool:
        """Free SWEEPING slots of the class. Where there are none, sweep others until a slab is unassigned,
        and return False.
        """
        states = self._states
        for sweep in list(states.sweeps):
            if states.sweep(sweep, slot_bytes, out):
                return True
        while states.sweeps and not self._slots.has_unassigned and budget.left > 0:
            budget.left -= CHUNK_SLOTS
            states.sweep(states.sweeps[0], None, out)
        return False


def _bounds(pages: NamespacePages) -> list[tuple[NamespacePages | Family, int]]:
    """The quotas that the namespace has, and whose pages count for each."""
    holders = (pages,) if pages.family is None else (pages, pages.family)
    return [(holder, holder.quota_bytes) for holder in holders if holder.quota_bytes is not None]
