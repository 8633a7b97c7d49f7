"""Where the node has pages, told to those who follow it (kv_events.py). Pure.

A page has a place: memory ("dram"), the name of the first tier that has it, or none. While an event is
handled the store and the tiers note each key whose place may have changed. At its end each of these is looked
up. So what is told is what is so, by whatever way it came about.

Pages that went together with their namespace, or with its tiers, are not told one by one: they may be
millions. Then all places that were told before are void, and the shell tells all of them anew, a few at a
time.
"""

from __future__ import annotations

from pdserve.kvpool.core.events import Action, PagesMoved, PlacesVoid
from pdserve.kvpool.core.store.index import NONE
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.core.tiering.coordinator import Tiers


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
