"""Promotion: loads of pages from a tier into the arena, and the Gets that wait for them. Pure.

    Get of a page that is in a tier only
      -> a slot is reserved, as for a writer: writers get BUSY meanwhile, lookups do not find the page
      -> LoadPages: a tier's thread reads into the slot and checks the bytes
      -> PagesLoaded: the slot is committed and pinned for every waiting Get, or given back

One load serves all Gets of its key. A Get is answered once: when all its loads have ended, or at its
deadline. At the deadline its unfinished loads are misses, and become late: later Gets do not wait for them,
and the tier counts as not having the page (tier_index.py). A late page is promoted nevertheless, unless a
writer stores the page anew, or another tier has it: the load is void then, as it is if its namespace was
dropped or cleared. The slot of a void load stays in quarantine until the thread reports that it has stopped
writing.

A hint (`ahead`) begins loads that no Get waits for. All loads under way have a bound in bytes, and a hint
uses `AHEAD_SHARE` of it at most: so Gets find the rest free, and wait for few loads before their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pdserve.kvpool.core.events import Action, LoadPages, PagesLoaded, SlotPage
from pdserve.kvpool.core.pending_gets import PendingGets
from pdserve.kvpool.core.sessions import PendingGet
from pdserve.kvpool.core.store.index import NONE
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.core.store.room import DropBudget
from pdserve.kvpool.core.tiering.tier_index import TierIndexes, TieringLimits
from pdserve.kvpool.protocol.slot_table import QUARANTINED, RESERVED
from pdserve.kvpool.tiers.base import GONE, LOADED, PageName, TierPage

AHEAD_SHARE: Final = 1 / 4


@dataclass(slots=True, eq=False)
class Load:
    """A slot being filled from a tier."""

    slot: int
    namespace: int
    name: PageName
    sequence: int
    tier: int
    void: bool = False
    late: bool = False  # it missed the deadline of a Get: no other Get waits for it, the tier has lost it
    waiting: dict[PendingGet, list[int]] = field(default_factory=dict)  # -> indices of the page in the Get


class Promotions:
    """Loads of all sessions, for `gets` that wait for them. `on_commit(slots, now_s, out)` is called as
    pages become readable.
    """

    def __init__(
        self,
        store: PageStore,
        index: TierIndexes,
        limits: TieringLimits,
        gets: PendingGets,
        on_commit: Callable[[list[int], float, list[Action]], None],
    ) -> None:
        self._store = store
        self._index = index
        self._limits = limits
        self._gets = gets
        self._on_commit = on_commit
        self._loads: dict[int, Load] = {}  # by slot, including void loads
        self._by_name: dict[tuple[int, bytes], Load] = {}
        self._load_bytes = 0
        self.promoted = 0
        self.failed = 0
        self.refused = 0
        self.late = 0

    # --- a Get

    def begin(self, get: PendingGet, missing: Sequence[int], now_s: float, out: list[Action]) -> list[int]:
        """See `Source.begin`."""
        request, left = get.request, list[int]()
        length_bytes = sum(request.segment_bytes)
        batches: dict[int, list[SlotPage]] = {}
        budget = self._store.drop_budget()
        for index in missing:
            load = self._load(request.namespace, request.keys[index], length_bytes, batches, budget, out)
            if load is None:
                left.append(index)
            else:
                load.waiting.setdefault(get, []).append(index)
        out.extend(LoadPages(tier, tuple(batch)) for tier, batch in batches.items())
        return left

    def ahead(self, namespace: int, keys: Sequence[bytes], out: list[Action]) -> None:
        """Load those of the pages that only a tier has, the first ones first, as far as there is room."""
        batches: dict[int, list[SlotPage]] = {}
        budget = self._store.drop_budget()
        for key in keys:
            if self._load_bytes >= AHEAD_SHARE * self._limits.load_bytes:
                break
            length_bytes = self._index.find(namespace, key)[1]
            if length_bytes:
                self._load(namespace, key, length_bytes, batches, budget, out)
        out.extend(LoadPages(tier, tuple(batch)) for tier, batch in batches.items())

    def _load(
        self,
        namespace: int,
        key: bytes,
        length_bytes: int,
        batches: dict[int, list[SlotPage]],
        budget: DropBudget,
        out: list[Action],
    ) -> Load | None:
        load = self._by_name.get((namespace, key))
        if load is not None and not load.late:
            return load if load.name.length_bytes == length_bytes else None
        tier, found_bytes = self._index.find(namespace, key)
        if tier == NONE or found_bytes != length_bytes:
            return None
        self.give_way(namespace, key, out)
        slot_bytes = self._store.slots.class_of(length_bytes)
        pages = self._store.index.namespace(namespace)
        if slot_bytes is None or key in pages.writing or key in pages.committed:
            return None
        if self._load_bytes and self._load_bytes + slot_bytes > self._limits.load_bytes:
            self.refused += 1
            if self._index.tiers[tier].late:  # they may stay for ever: what is left cannot be read either
                self._index.stall(tier)
            return None
        slots = self._store.take(pages, [key], length_bytes, slot_bytes, out, budget)
        if not slots:
            self.refused += 1
            return None
        slot = slots[0]
        name = PageName(self._index.space_of(namespace), key, length_bytes)
        load = Load(slot, namespace, name, self._store.facts.sequence[slot], tier)
        self._loads[slot] = self._by_name[namespace, key] = load
        self._load_bytes += slot_bytes
        batches.setdefault(tier, []).append(self._slot_page(load))
        return load

    def _slot_page(self, load: Load) -> SlotPage:
        name = load.name
        page = TierPage(name.space, name.key, name.length_bytes, 0, load.sequence)
        return SlotPage(load.slot, self._store.slots.offset(load.slot), page)

    # --- its end

    def loaded(
        self,
        event: PagesLoaded,
        now_s: float,
        out: list[Action],
    ) -> None:
        """A tier's thread has finished writing into these slots."""
        self._index.answered(event.tier)
        for slot, status, checksum in zip(event.slots, event.statuses, event.checksums, strict=True):
            load = self._loads[slot]
            if load.late and status == LOADED:
                self._index.late_loaded(load.tier, load.name)
            if load.void:
                if load.late and status != LOADED and self._is_current(load):
                    self._forget(load, out)
                self._end(load)
                self._store.give_back([slot], out)
            elif status == LOADED:
                self._end(load)
                self._store.commit([slot], [checksum], now_s, out)
                self.promoted += 1
                self._on_commit([slot], now_s, out)
                self._resolve(load, slot, now_s, out)
            else:
                self._failed(load, status, now_s, out)

    def _failed(self, load: Load, status: int, now_s: float, out: list[Action]) -> None:
        """The tier could not load the page: try the next tier, or report a miss."""
        name = load.name
        self.failed += status != GONE
        self._forget(load, out)
        tier, length_bytes = self._index.find(load.namespace, name.key)
        if tier != NONE and length_bytes == name.length_bytes:
            load.tier = tier
            out.append(LoadPages(tier, (self._slot_page(load),)))
            return
        self._end(load)
        self._store.give_back([load.slot], out)
        self._resolve(load, NONE, now_s, out)

    def _forget(self, load: Load, out: list[Action]) -> None:
        """The tier's copy is of no use."""
        self._index.forget(load.namespace, [load.name.key], out, only=load.tier)
        self._index.on_damage(load.namespace, load.name.key)

    def _is_current(self, load: Load) -> bool:
        """Whether the load's namespace still has the space in which the page is."""
        return self._index.namespace_of(load.name.space) == load.namespace

    def _end(self, load: Load) -> None:
        del self._loads[load.slot]
        if not load.void:
            del self._by_name[load.namespace, load.name.key]
        self._load_bytes -= self._store.slots.slot_bytes(load.slot)

    def _resolve(self, load: Load, slot: int, now_s: float, out: list[Action]) -> None:
        """Tell the waiting Gets that the page is in `slot`; NONE: it is a miss."""
        waiting, load.waiting = load.waiting, {}
        self._gets.arrived(waiting, slot, now_s, out, from_tier=True)

    # --- what happens meanwhile

    def leave(self, get: PendingGet, *, late: bool) -> None:
        """See `Source.leave`. Late loads go on, and no later Get waits for them."""
        for key in get.request.keys:
            load = self._by_name.get((get.request.namespace, key))
            indices = load.waiting.pop(get, []) if load is not None else []
            if load is not None and indices and late:
                self.late += len(indices)
                if not load.late:
                    load.late = True
                    self._index.late(load.tier, load.name)

    def clear(self, namespace: int, out: list[Action]) -> None:
        """Void the loads in progress for the namespace."""
        for load in list(self._loads.values()):
            if load.namespace != namespace:
                continue
            load.late = False  # the tier forgets the page
            if not load.void:
                self._void(load, out)

    def give_way(self, namespace: int, key: bytes, out: list[Action]) -> bool:
        """Void a late load of the page: it is stored anew, or read from elsewhere. False if there is none."""
        load = self._by_name.get((namespace, key))
        if load is None or not load.late:
            return False
        self._void(load, out)
        return True

    def _void(self, load: Load, out: list[Action]) -> None:
        load.void = True
        del self._by_name[load.namespace, load.name.key]
        self._store.quarantine(load.slot)
        self._resolve(load, NONE, 0.0, out)

    # --- status, conservation

    def counters(self) -> dict[str, int]:
        return {
            "promoted": self.promoted,
            "promotions_failed": self.failed,
            "promotions_refused": self.refused,
            "promotions_late": self.late,
        }

    def reserved_slots(self) -> list[int]:
        """The slots reserved by loads, not by clients."""
        return [load.slot for load in self._loads.values() if not load.void]

    def check(self) -> None:
        """Assert that loads own their slots, and Gets wait for something. Slow: for tests."""
        for slot, load in self._loads.items():
            assert self._store.state(slot) == (QUARANTINED if load.void else RESERVED)
            assert self._store.facts.sequence[slot] == load.sequence
            assert load.void == (self._by_name.get((load.namespace, load.name.key)) is not load)
        assert self._load_bytes == sum(self._store.slots.slot_bytes(slot) for slot in self._loads)

    def waited_for(self, get: PendingGet) -> int:
        """How many pages of the Get are being loaded. For tests."""
        return sum(len(load.waiting.get(get, ())) for load in self._loads.values())
