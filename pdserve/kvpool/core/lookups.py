"""Questions about pages: whether they are there, where, and what became of them. Pure.

A page has a place: memory ("dram"), the name of the first tier that has it, or none. `PlaceChanges` tells
those who follow the node (kv_events.py) of changes: while an event is handled the store and the tiers note
each key whose place may have changed, and at its end each of these is looked up. Pages that went together
with their namespace, or with its tiers, are not told one by one: they may be millions. Then all places that
were told before are void, and the shell tells all of them anew, a few at a time.

**Listing.** The pages of a namespace on this node are the answer to `ListPages`. The cursor is a slot number,
so pages that are written or evicted meanwhile neither end the listing nor repeat. One answer examines at most
`SCAN_SLOTS` slots, so it may be short or empty without being the last. Pages that are only in a tier follow.
Their cursors are `slots` and above: indices in a list of keys that is made when this part begins. A page that
moves between memory and a tier meanwhile may be listed twice, or not at all."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np

from pdserve.kvpool.core.events import Action, PagesMoved, PlacesVoid
from pdserve.kvpool.core.sharding.coordinator import Sharding
from pdserve.kvpool.core.store.index import NONE, REASONS
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.core.tiering.coordinator import Tiers
from pdserve.kvpool.protocol.cluster_messages import PageEntry
from pdserve.kvpool.protocol.messages import IN_MEMORY, MAX_FATES, NOWHERE, Exists, Fate, Present
from pdserve.kvpool.protocol.slot_table import COMMITTED


class Lookups:
    """Answers from memory and tiers as they are now."""

    def __init__(self, store: PageStore, tiers: Tiers) -> None:
        self._store = store
        self._tiers = tiers

    def answer(self, request: Exists, now_s: float) -> Present:
        """The namespace is open, and the asker may read it."""
        find, has = self._store.index.namespace(request.namespace).lookup(now_s), self._tiers.has
        namespace = request.namespace
        slots = [find(key) for key in request.keys]
        mask = bytes(
            slot is not None or has(namespace, key) for key, slot in zip(request.keys, slots, strict=True)
        )
        if not (request.fates or request.places):
            return Present(request.id, mask)
        asked = list(zip(request.keys, slots, strict=True))[: MAX_FATES if request.fates else 0]
        fates = [self._fate(namespace, key, slot, now_s) for key, slot in asked]
        places, tiers = self._places(request, slots) if request.places else (b"", [])
        return Present(request.id, mask, fates, places, tiers)

    def _fate(self, namespace: int, key: bytes, slot: int | None, now_s: float) -> Fate:
        """Since when a page is there, and when and why it was removed last."""
        removal = self._store.removed.find(namespace, key)
        stored_ago_s = None if slot is None else now_s - self._store.facts.committed_s[slot]
        if removal is None:
            return Fate(stored_ago_s)
        return Fate(stored_ago_s, REASONS[removal.reason], now_s - removal.removed_s)

    def _places(self, request: Exists, slots: list[int | None]) -> tuple[bytes, list[str]]:
        """See `Present`."""
        tiers = self._tiers.status() if self._tiers.any else []
        numbers = {"": NOWHERE, **{tier.name: place for place, tier in enumerate(tiers, IN_MEMORY + 1)}}
        place = self._tiers.place
        places = bytes(
            IN_MEMORY if slot is not None else numbers[place(request.namespace, key)[0]]
            for key, slot in zip(request.keys, slots, strict=True)
        )
        return places, [tier.kind for tier in tiers]  # names have paths, which clients need not know


class PlaceChanges:
    """Follows `store` and `tiers` from now on."""

    def __init__(self, store: PageStore, tiers: Tiers) -> None:
        self._store = store
        self._tiers = tiers
        self._changed: dict[tuple[int, bytes], None] = {}
        self._void = False
        store.on_change = self._in_memory
        tiers.follow(self._in_tier)

    def _in_memory(self, namespace: int, key: bytes | None) -> None:
        if key is None:
            self._void = True
        else:
            self._changed[namespace, key] = None

    def _in_tier(self, namespace: int, key: bytes | None) -> None:
        # of a page in memory a tier's copy changes nothing
        if key is None or self._store.find(namespace, key) == NONE:
            self._in_memory(namespace, key)

    def tell(self, out: list[Action]) -> None:
        """What has changed since the last call."""
        if self._void:
            out.append(PlacesVoid())
        elif self._changed:
            by_namespace: dict[int, list[bytes]] = {}
            for namespace, key in self._changed:
                by_namespace.setdefault(namespace, []).append(key)
            out.extend(
                PagesMoved(namespace, keys, [self._place(namespace, key) for key in keys])
                for namespace, keys in by_namespace.items()
            )
        self._changed.clear()
        self._void = False

    def _place(self, namespace: int, key: bytes) -> str:
        in_memory = self._store.find(namespace, key) != NONE
        return "dram" if in_memory else self._tiers.place(namespace, key)[0]


SCAN_SLOTS: Final = 1 << 20  # takes 2 ms
MAX_KEY_LISTS: Final = 8  # lists of keys kept, one for each listing that has reached the tiers


class PageListing:
    """The listings of all clients."""

    def __init__(self, store: PageStore, sharding: Sharding, tiers: Tiers) -> None:
        self._store = store
        self._sharding = sharding
        self._tiers = tiers
        self._tier_keys: OrderedDict[tuple[int, int], list[bytes]] = OrderedDict()

    def answer(self, namespace: int, cursor: int, limit: int, asker: int) -> tuple[list[PageEntry], int]:
        """At most `limit` pages from the cursor on, and the next cursor (0: the end)."""
        store, slots = self._store, self._store.slots.slots
        if cursor < 0:
            return [], 0
        if cursor >= slots:
            return self._list_tiers(namespace, cursor, limit, asker)
        end = min(slots, cursor + SCAN_SLOTS)
        numbers = np.frombuffer(store.facts.namespace, np.uint32)[cursor:end]
        committed = np.frombuffer(store.states, np.uint8)[cursor:end] == COMMITTED
        found = np.flatnonzero((numbers == namespace) & committed) + cursor
        pages = [self._entry(slot) for slot in found[:limit].tolist()]
        if len(found) > limit:
            return pages, int(found[limit])
        if end < slots or self._keys(namespace, asker, begin=True):
            return pages, end
        return pages, 0

    def _list_tiers(self, namespace: int, cursor: int, limit: int, asker: int) -> tuple[list[PageEntry], int]:
        """The part of the answers after the last slot."""
        start = cursor - self._store.slots.slots
        keys = self._keys(namespace, asker, begin=start == 0)
        committed = self._store.index.namespace(namespace).committed
        pages = []
        for key in keys[start : start + limit]:
            place, length_bytes = self._tiers.place(namespace, key)
            if length_bytes and key not in committed:
                pages.append(PageEntry(key, length_bytes, place))
        if start + limit < len(keys):
            return pages, cursor + limit
        self._tier_keys.pop((namespace, asker), None)
        return pages, 0

    def gone(self, asker: int) -> None:
        """The client disconnected."""
        for listed in [listed for listed in self._tier_keys if listed[1] == asker]:
            del self._tier_keys[listed]

    def _keys(self, namespace: int, asker: int, *, begin: bool) -> list[bytes]:
        """The keys in tiers that the asker goes through: a new list at the beginning, or when it was
        forgotten.
        """
        known = self._tier_keys.pop((namespace, asker), None)
        if known is None or begin:
            known = self._tiers.keys(namespace)
        if known:
            self._tier_keys[namespace, asker] = known
            while len(self._tier_keys) > MAX_KEY_LISTS:
                self._tier_keys.popitem(last=False)
        return known

    def _entry(self, slot: int) -> PageEntry:
        store = self._store
        replica = slot in self._sharding.replicas
        length_bytes = store.facts.length_bytes[slot]
        return PageEntry(store.key_of(slot), length_bytes, "dram", store.holds(slot), replica)
