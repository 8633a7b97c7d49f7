"""The pages of a namespace on this node: the answer to `ListPages`. Pure.

The cursor is a slot number, so pages that are written or evicted meanwhile neither end the listing nor
repeat. One answer examines at most `SCAN_SLOTS` slots, so it may be short or empty without being the last.
Pages that are only in a tier follow. Their cursors are `slots` and above: indices in a list of keys that is
made when this part begins. A page that moves between memory and a tier meanwhile may be listed twice, or not
at all.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np

from pdserve.kvpool.core.sharding.coordinator import Sharding
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.core.tiering.coordinator import Tiers
from pdserve.kvpool.protocol.cluster_messages import PageEntry
from pdserve.kvpool.protocol.slot_table import COMMITTED

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
