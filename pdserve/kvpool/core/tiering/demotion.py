"""Demotion: the choice of pages to store in tiers, and its time. Pure; appends its actions to `out`.

A page is in at most one slot of the arena and in any number of tiers. Its bytes never change, so copies are
never out of date. The stores of a page:

    commit         -> stored in the first tier at once    write = "all", or a namespace of media "ssd"
    coldest pages  -> stored in the first tier            while more than `watermark` of the arena is in use
    tier i drops it for lack of room -> tier i + 1        by the shell, if that tier can keep up
    found after a restart, in no tier -> as after commit, in steps, when the tiers have reported their pages

So evicting a cold page costs nothing: it is in a tier already. Most of the coldest pages are, at any time; a
byte a slot says which ones (`_stored`), so that a pass looks at the others alone.

A slot that is being stored is held. Stores in
progress are bounded in pages and bytes. If a tier is slower than the writers, pages are evicted without a
store; this is counted, and no writer waits. promotion.py has the way back, tier_index.py the tiers' contents.

A tier's one writer thread makes all changes of the tier, in the order of our actions, and reports them in
that order. So this module only needs to keep later decisions: pages that were discarded while they were being
stored (`void`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from pdserve.kvpool.core.events import (
    Action,
    ForgetPages,
    PagesFound,
    PagesGone,
    PagesStored,
    SlotPage,
    StorePages,
)
from pdserve.kvpool.core.store.index import NONE
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.core.store.room import coldest
from pdserve.kvpool.core.tiering.tier_index import TierIndexes, TieringLimits
from pdserve.kvpool.protocol.cluster_messages import NamespaceSettings
from pdserve.kvpool.protocol.slot_table import COMMITTED
from pdserve.kvpool.tiers.base import REFUSED, STORED, PageName, TierPage

SCAN_PAGES: Final = 1024  # coldest pages examined per pass, in all namespaces together
SCAN_EVERY: Final = 128  # most commits between two passes
STORE_SHARE: Final = 1 / 8  # most of the arena held by stores: a slow tier must not block writers
SCAN_SHARE: Final = 1 / 64  # most of the arena written per pass
UNSAVED_PAGES: Final = 2048  # slots examined in one step after a restart
UNSAVED_STEP_S: Final = 0.005  # pause between steps, for other requests


@dataclass(slots=True)
class _Store:
    """A slot that is held while it is written to the first tier."""

    namespace: int
    page: TierPage
    void: bool = False
    again: bool = False
    """It is forgotten as soon as it is there, as its damaged copy was, and is to be stored again."""


class Demotions:
    """Stores to tiers. `settings(namespace)`: its settings, None if it is gone."""

    def __init__(
        self,
        store: PageStore,
        index: TierIndexes,
        limits: TieringLimits,
        settings: Callable[[int], NamespaceSettings | None],
    ) -> None:
        self._store = store
        self._settings = settings
        self._limits = limits
        self._index = index
        self._tiers = index.tiers
        self._stores: dict[int, _Store] = {}  # by slot
        self._store_bytes = 0
        self._storing_bytes: dict[int, int] = {}  # bytes in `_stores` by namespace, for quotas
        self._at_once: OrderedDict[int, int] = OrderedDict()  # slot -> sequence, to be stored in this order
        self._commits = 0  # commits since the last pass over the coldest pages
        self._committed_bytes = 0
        self._scan_bytes = int(store.slots.capacity_bytes * SCAN_SHARE)
        self._max_store_bytes = min(limits.store_bytes, int(store.slots.capacity_bytes * STORE_SHARE))
        self._scan = False  # the last pass ended early
        # by slot: 1 where a pass need not look at the page, since a tier has it. Set by a pass and by the end
        # of a store; 0 again when another page comes to the slot, or a tier loses the page.
        self._stored = bytearray(store.slots.slots if index.tiers else 0)
        self._unsaved: list[tuple[int, int]] = []  # (namespace, first slot) still to be examined for pages
        self._unsaved_at_s = 0.0  # time of the next step
        self.evicted_unwritten = 0
        if index.tiers:
            store.on_evict, store.in_tier = self._evicted, index.has
            index.on_loss, index.on_damage = self._lost, self._damaged

    def sinks(self, namespace: int) -> bool:
        """Whether pages of the namespace are stored in tiers. Pages with a time to live are not.

        Neither a tier's format nor the index has expiry times, and a tier survives the reboot that resets
        the monotonic clock.
        """
        settings = self._settings(namespace)
        return settings is not None and _sinks(settings)

    # --- down

    @property
    def due(self) -> bool:
        """Whether `pump` has something to do."""
        return bool(self._at_once or self._unsaved) or self._scan_due

    @property
    def behind(self) -> bool:
        """Whether memory is full and more pages wait than can be stored at a time.

        New pages may then evict waiting ones.
        """
        first = self._tiers[0]
        waiting = bool(self._at_once or self._scan) and not (first.backoff.failures or first.stalled)
        return waiting and self._above_watermark()

    @property
    def _scan_due(self) -> bool:
        return self._scan or self._commits >= SCAN_EVERY or self._committed_bytes > self._scan_bytes

    def committed(self, slots: Sequence[int]) -> None:
        """A client wrote the pages in these slots."""
        facts, namespace, wants_all = self._store.facts, NONE, False
        self._commits += len(slots)
        for slot in slots:
            self._committed_bytes += facts.length_bytes[slot]
            self._stored[slot] = 0
            if facts.namespace[slot] != namespace:
                namespace = facts.namespace[slot]
                wants_all = self._wants_all(namespace)
            if wants_all:
                self._at_once[slot] = facts.sequence[slot]

    def loaded(self, slot: int) -> None:
        """The page in this slot came up from a tier."""
        self._stored[slot] = 0  # the tier may have lost it meanwhile: a pass looks

    def _store_at_once(self, slot: int) -> None:
        """Queue the slot if the namespace or the node stores every page, not only cold ones."""
        if self._wants_all(self._store.facts.namespace[slot]):
            self._at_once[slot] = self._store.facts.sequence[slot]

    def _wants_all(self, namespace: int) -> bool:
        settings = self._settings(namespace)
        return settings is not None and (self._tiers[0].spec.write == "all" or settings.media == "ssd")

    def _find_unsaved(self, now_s: float) -> None:
        """Examine some pages that an earlier incarnation committed and perhaps did not store."""
        namespace, start = self._unsaved.pop()
        slots = self._store.committed_slots(start, UNSAVED_PAGES, namespace).tolist()
        key_of = self._store.facts.key
        for slot in slots:
            if not self._index.has(namespace, key_of[slot] or b"") and self._wants_all(namespace):
                self._at_once[slot] = self._store.facts.sequence[slot]
        if len(slots) == UNSAVED_PAGES:
            self._unsaved.append((namespace, slots[-1] + 1))
        self._unsaved_at_s = now_s + UNSAVED_STEP_S

    def pump(self, now_s: float, out: list[Action]) -> None:
        """Start as many stores as the bounds permit."""
        first = self._tiers[0] if self._tiers else None
        if first is None or not first.ready or first.stalled or now_s < first.backoff.retry_at_s:
            self._commits = self._committed_bytes = 0
            return
        if self._unsaved and not self._at_once and now_s >= self._unsaved_at_s:
            self._find_unsaved(now_s)
        batch: list[SlotPage] = []
        while self._at_once and self._has_room():
            slot, sequence = self._at_once.popitem(last=False)
            if self._store.facts.sequence[slot] == sequence and self._storable(slot):
                batch.append(self._begin(slot))
        if self._scan_due:
            self._commits = self._committed_bytes = 0
            self._scan = False
            if self._above_watermark():
                self._pump_coldest(batch)
        if batch:
            out.append(StorePages(0, tuple(batch)))

    def _pump_coldest(self, batch: list[SlotPage]) -> None:
        sinking = [pages for pages in self._store.index if pages.committed and self._takes(pages.number)]
        stored = np.frombuffer(self._stored, np.uint8)
        for pages, cold in coldest(sinking, SCAN_PAGES):
            for first in cold[stored[cold] == 0].tolist():
                # what is of no use apart sinks together
                for slot in (first,) if pages.kin is None else (first, *self._store.kin_of([first])):
                    if not self._has_room():
                        self._scan = bool(self._stores)  # continue at the end of a store
                        return
                    if self._storable(slot):
                        batch.append(self._begin(slot))
                    elif slot not in self._stores:
                        self._stored[slot] = self._index.has(pages.number, self._store.key_of(slot))

    def _takes(self, namespace: int) -> bool:
        """Whether tiers store pages of the namespace, and its quota there is not used up."""
        settings = self._settings(namespace)
        return settings is not None and _sinks(settings) and self._has_quota(namespace, settings, 1)

    def _has_quota(self, namespace: int, settings: NamespaceSettings, size_bytes: int) -> bool:
        """Whether tiers may take so much more of the namespace, and of it with its family."""
        quota_bytes, family = settings.tier_quota_bytes, self._store.index.namespace(namespace).family
        if quota_bytes and self._held_bytes(namespace) + size_bytes > quota_bytes:
            return False
        if family is None or not family.tier_quota_bytes:
            return True
        held_bytes = sum(self._held_bytes(pages.number) for pages in family.members)
        return held_bytes + size_bytes <= family.tier_quota_bytes

    def _held_bytes(self, namespace: int) -> int:
        """Bytes of the namespace in tiers, or on their way there."""
        return self._storing_bytes.get(namespace, 0) + self._index.page_bytes(namespace)

    def _lost(self, namespace: int | None, key: bytes) -> None:
        """A tier has the page no longer; None: or any page."""
        if namespace is None:
            self._stored[:] = bytes(len(self._stored))
        elif (slot := self._store.find(namespace, key)) != NONE:
            self._stored[slot] = 0

    def _damaged(self, namespace: int, key: bytes) -> None:
        """A tier's copy was of no use; what was written meanwhile is in memory alone."""
        slot = self._store.find(namespace, key)
        if slot == NONE:
            return
        if slot in self._stores:
            self._stores[slot].void = self._stores[slot].again = True
        elif self._store.state(slot) == COMMITTED:
            self._store_at_once(slot)

    def _has_room(self) -> bool:
        limits = self._limits
        return not self._stores or (
            len(self._stores) < limits.store_pages and self._store_bytes < self._max_store_bytes
        )

    def _above_watermark(self) -> bool:
        slots = self._store.slots
        free_bytes = self._store.free_bytes - slots.tail_bytes  # into the tails of slabs no page fits
        return free_bytes < (1 - self._limits.watermark) * (slots.capacity_bytes - slots.tail_bytes)

    def _storable(self, slot: int) -> bool:
        facts = self._store.facts
        if slot in self._stores or self._store.states[slot] != COMMITTED:
            return False
        namespace, key, length = facts.namespace[slot], facts.key[slot], facts.length_bytes[slot]
        settings = self._settings(namespace)
        assert key is not None
        if settings is None or not _sinks(settings) or length >= self._tiers[0].largest_bytes:
            return False
        if not self._has_quota(namespace, settings, length):
            return False
        return not self._index.has(namespace, key)

    def _begin(self, slot: int) -> SlotPage:
        facts = self._store.facts
        key = facts.key[slot]
        assert key is not None
        namespace = facts.namespace[slot]
        page = TierPage(
            self._index.space_of(namespace),
            key,
            facts.length_bytes[slot],
            facts.checksum[slot],
            facts.sequence[slot],
        )
        self._stores[slot] = _Store(namespace, page)
        self._count(namespace, page.length_bytes)
        self._store.hold(slot)
        return SlotPage(slot, self._store.slots.offset(slot), page)

    def _count(self, namespace: int, size_bytes: int) -> None:
        self._store_bytes += size_bytes
        under_way = self._storing_bytes.pop(namespace, 0) + size_bytes
        if under_way:
            self._storing_bytes[namespace] = under_way

    # --- what the tiers report

    def stored(self, event: PagesStored, now_s: float, out: list[Action]) -> None:
        """Stores of `pump` have ended."""
        tier = self._tiers[event.tier]
        tier.used_bytes = event.used_bytes
        for slot, status in zip(event.slots, event.statuses, strict=True):
            storing = self._stores.pop(slot)
            page = storing.page
            self._count(storing.namespace, -page.length_bytes)
            in_use = self._store.state(slot) == COMMITTED
            self._store.let_go(slot, out)
            if status == STORED:
                tier.stored += 1
                if not storing.void and self._valid(page.space):
                    tier.add(page.space, page.key, page.length_bytes)
                    if in_use:
                        # a tier that hangs has taken it, and cannot give it: a pass looks again
                        self._stored[slot] = self._index.has(storing.namespace, page.key)
                        self._drop_copy(slot, storing.namespace, out)
                elif storing.again and in_use:
                    self._store_at_once(slot)
            elif status == REFUSED:
                tier.largest_bytes = min(tier.largest_bytes, page.length_bytes)
            else:
                tier.store_failed += 1
                if in_use:
                    self._store_at_once(slot)
        if event.failed:
            tier.backoff.failed(now_s)
        else:
            tier.backoff.worked()

    def _drop_copy(self, slot: int, namespace: int, out: list[Action]) -> None:
        """In a namespace of media "ssd", drop the copy in memory."""
        settings = self._settings(namespace)
        if settings is None or settings.media != "ssd" or not self._above_watermark():
            return
        if not self._store.holds(slot):
            self._store.drop([slot], out)

    def found(self, event: PagesFound, now_s: float, out: list[Action]) -> None:
        """Pages are in the tier: they survived a restart or came from the tier above."""
        tier = self._tiers[event.tier]
        tier.used_bytes = event.used_bytes
        if event.failed:
            tier.store_failed += event.failed
            tier.backoff.failed(now_s)
        elif event.pages:
            tier.backoff.worked()
        valid = {space for space in {page.space for page in event.pages} if self._valid(space)}
        void = []
        for page in event.pages:
            if page.space in valid:
                tier.add(page.space, page.key, page.length_bytes)
            else:
                void.append(PageName(page.space, page.key, page.length_bytes))
        if void:
            out.append(ForgetPages(event.tier, tuple(void)))
        if event.last:
            tier.ready = True
            self._scan = True
            if self._index.ready:
                numbers = [pages.number for pages in self._store.index if pages.committed]
                self._unsaved = [(n, 0) for n in numbers if self._wants_all(n) and self.sinks(n)]

    def gone(self, event: PagesGone) -> None:
        """Pages have left the tier.

        A page that was forgotten while it came from the tier above stays in the index until this event.
        """
        tier = self._tiers[event.tier]
        tier.used_bytes = event.used_bytes
        for name in event.names:
            tier.gone += tier.remove(name.space, name.key)

    def _valid(self, space: int) -> bool:
        """Whether the space is current and its namespace uses tiers."""
        namespace = self._index.namespace_of(space)
        return namespace is not None and self.sinks(namespace)

    # --- forgetting

    def forget(self, namespace: int, keys: Sequence[bytes], out: list[Action], *, own: bool = False) -> None:
        """Drop damaged or unwanted pages from every tier, or (`own`) from those that are not shared."""
        self._index.forget(namespace, keys, out, own=own)
        gone = set(keys)
        for storing in self._stores.values():
            if storing.namespace == namespace and storing.page.key in gone:
                storing.void = True

    def clear(self, namespace: int) -> None:
        """Void the stores in progress for the namespace."""
        for storing in self._stores.values():
            if storing.namespace == namespace:
                storing.void = True

    def unwanted(self, namespace: int) -> bool:
        """Whether tiers have pages of a namespace that does not use tiers."""
        return not self.sinks(namespace) and bool(self._index.page_bytes(namespace))

    def _evicted(self, slot: int) -> None:
        facts = self._store.facts
        key = facts.key[slot]
        assert key is not None
        if self.sinks(facts.namespace[slot]) and not self._index.has(facts.namespace[slot], key):
            self.evicted_unwritten += 1

    # --- time, conservation

    def next_deadline_s(self) -> float:
        """The time of the next try of a failed tier, if pages wait for it, or of the next step."""
        if self._tiers and not self._stores:
            if self._tiers[0].backoff.failures and (self._at_once or self._unsaved):
                return self._tiers[0].backoff.retry_at_s
            if self._unsaved:
                return self._unsaved_at_s
        return float("inf")

    def check(self) -> None:
        """Assert that what is counted is there. Slow: for tests."""
        facts = self._store.facts
        for slot, stored in enumerate(self._stored):
            if stored and self._store.state(slot) == COMMITTED:
                assert self._index.has(facts.namespace[slot], facts.key[slot] or b""), "a pass would miss it"
        assert self._store_bytes == sum(storing.page.length_bytes for storing in self._stores.values())
        assert self._store_bytes == sum(self._storing_bytes.values())
        for slot, storing in self._stores.items():
            assert self._store.holds(slot)
            assert self._store.facts.sequence[slot] == storing.page.sequence


def _sinks(settings: NamespaceSettings) -> bool:
    return settings.media != "dram" and not settings.ttl_s
