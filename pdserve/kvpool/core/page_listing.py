"""Which pages of a namespace are here: `ListPages`, for people who look. Pure.

The cursor is a slot number, so pages that come and go meanwhile neither end the listing nor repeat in it. One
answer looks at `SCAN_SLOTS` slots at most, however large the arena: it may be short, or empty, and not the
last. Pages that are in a tier only follow: cursors from `slots` on are places in the list of keys that is
made when this part begins. A page that sinks or rises meanwhile may be listed twice, or not at all.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pdserve.kvpool.core.sharding.coordinator import Sharding
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.core.tiering.coordinator import Tiers
from pdserve.kvpool.protocol.cluster_messages import PageEntry
from pdserve.kvpool.protocol.slot_table import COMMITTED

SCAN_SLOTS: Final = 1 << 20  # 2 ms


def list_pages(
    store: PageStore, sharding: Sharding, tiers: Tiers, namespace: int, cursor: int, limit: int, asker: str
) -> tuple[list[PageEntry], int]:
    """At most `limit` pages from the cursor on, and the cursor to go on with (0: the end)."""
    slots = store.slots.slots
    if cursor < 0:
        return [], 0
    if cursor >= slots:
        return _list_tiers(store, sharding, tiers, namespace, cursor, limit, asker)
    end = min(slots, cursor + SCAN_SLOTS)
    numbers = np.frombuffer(store.facts.namespace, np.uint32)[cursor:end]
    committed = np.frombuffer(store.states, np.uint8)[cursor:end] == COMMITTED
    found = np.flatnonzero((numbers == namespace) & committed) + cursor
    pages = [_entry(store, sharding, slot) for slot in found[:limit].tolist()]
    if len(found) > limit:
        return pages, int(found[limit])
    if end < slots or sharding.ownership.tier_keys(namespace, asker, at=0):
        return pages, end
    return pages, 0


def _list_tiers(
    store: PageStore, sharding: Sharding, tiers: Tiers, namespace: int, cursor: int, limit: int, asker: str
) -> tuple[list[PageEntry], int]:
    """The part of the answers that concerns the tiers."""
    start = cursor - store.slots.slots
    keys = sharding.ownership.tier_keys(namespace, asker, at=start)
    committed = store.index.namespace(namespace).committed
    pages = []
    for key in keys[start : start + limit]:
        place, length_bytes = tiers.place(namespace, key)
        if length_bytes and key not in committed:
            pages.append(PageEntry(key, length_bytes, place))
    return pages, cursor + limit if start + limit < len(keys) else 0


def _entry(store: PageStore, sharding: Sharding, slot: int) -> PageEntry:
    key = store.facts.key[slot]
    assert key is not None, "a committed page has a key"
    heat = 0.0 if sharding.heat is None else sharding.heat.reads_s(slot)
    length_bytes, pins = store.facts.length_bytes[slot], store.holds(slot)
    return PageEntry(key, length_bytes, "dram", pins, slot in sharding.replicas, round(heat, 3))
