"""Which pages of a namespace are here: `ListPages`, for people who look. Pure.

The cursor is a slot number, so pages that come and go meanwhile neither end the listing nor repeat in it. One
answer looks at `SCAN_SLOTS` slots at most, however large the arena: it may be short, or empty, and not the
last.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pdserve.kvpool.cluster_messages import PageEntry
from pdserve.kvpool.sharing import Sharing
from pdserve.kvpool.store import COMMITTED, PageStore

SCAN_SLOTS: Final = 1 << 20  # 2 ms


def list_pages(
    store: PageStore, sharing: Sharing, namespace: int, cursor: int, limit: int
) -> tuple[list[PageEntry], int]:
    """At most `limit` committed pages from slot `cursor` on, and the cursor to go on with (0: the end)."""
    end = min(store.slots.slots, cursor + SCAN_SLOTS)
    if not 0 <= cursor < end:
        return [], 0
    numbers = np.frombuffer(store.facts.namespace, np.uint32)[cursor:end]
    committed = np.frombuffer(store.states, np.uint8)[cursor:end] == COMMITTED
    found = np.flatnonzero((numbers == namespace) & committed) + cursor
    pages = [_entry(store, sharing, slot) for slot in found[:limit].tolist()]
    if len(found) > limit:
        return pages, int(found[limit])
    return pages, end if end < store.slots.slots else 0


def _entry(store: PageStore, sharing: Sharing, slot: int) -> PageEntry:
    key = store.facts.key[slot]
    assert key is not None, "a committed page has a key"
    heat = 0.0 if sharing.heat is None else sharing.heat.reads_s(slot)
    length_bytes, pins = store.facts.length_bytes[slot], store.holds(slot)
    return PageEntry(key, length_bytes, "dram", pins, slot in sharing.replicas, round(heat, 3))
