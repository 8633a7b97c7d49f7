"""The tiers as one object for NodeState. Pure. Without tiers it costs nothing.

It joins stores to tiers (demotion.py), loads from tiers (promotion.py), and the index (tier_index.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import msgspec

from pdserve.kvpool.core.events import (
    Action,
    ErasePages,
    OpenSpace,
    PagesFound,
    PagesGone,
    PagesLoaded,
    PagesStored,
)
from pdserve.kvpool.core.pending_gets import PendingGets
from pdserve.kvpool.core.sessions import PendingGet
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.core.tiering.demotion import Demotions
from pdserve.kvpool.core.tiering.promotion import Promotions
from pdserve.kvpool.core.tiering.tier_index import TierIndexes, TieringLimits, TierSpec
from pdserve.kvpool.namespaces.catalog import Namespace, item_bytes
from pdserve.kvpool.protocol.cluster_messages import NamespaceSettings, TierStatus
from pdserve.kvpool.tiers.base import SpaceFacts

TierEvent: TypeAlias = PagesFound | PagesStored | PagesGone | PagesLoaded
Found: TypeAlias = Callable[[int, bytes, float, list[Action]], None]
OnCommit: TypeAlias = Callable[[list[int], float, list[Action]], None]


class Tiers:
    """`settings(namespace)`: its settings, None if it is gone. `gets` wait for pages that are loaded.
    `on_commit(slots, now_s, out)` is called for pages that were loaded, `found(namespace, key, now_s, out)`
    for pages that a tier turned out to have.
    """

    def __init__(
        self,
        store: PageStore,
        tiers: Sequence[TierSpec],
        limits: TieringLimits,
        settings: Callable[[int], NamespaceSettings | None],
        gets: PendingGets,
        on_commit: OnCommit,
        found: Found,
    ) -> None:
        self._found = found
        self._index = TierIndexes(tiers)
        self._demotions = Demotions(store, self._index, limits, settings)
        self._promotions = Promotions(store, self._index, limits, gets, self._loaded)
        self._on_commit = on_commit
        self._unwanted: set[int] = set()
        self._facts: dict[int, SpaceFacts] = {}  # by namespace
        self._opened: list[OpenSpace] = []
        self.any = bool(tiers)

    # --- looking

    def has(self, namespace: int, key: bytes) -> bool:
        """Whether a tier can give the page."""
        return self.any and self._index.has(namespace, key)

    def follow(self, on_change: Callable[[int, bytes | None], None]) -> None:
        """See `TierIndexes.follow`."""
        self._index.follow(on_change)

    # --- what happens

    def handle(self, event: TierEvent, now_s: float, out: list[Action]) -> None:
        """Take in a tier's report."""
        if isinstance(event, PagesLoaded):
            self._promotions.loaded(event, now_s, out)
        elif isinstance(event, PagesStored):
            self._demotions.stored(event, now_s, out)
        elif isinstance(event, PagesGone):
            self._demotions.gone(event)
        else:
            self._demotions.found(event, now_s, out)
            for page in event.pages:
                namespace = self._index.namespace_of(page.space)
                if namespace is not None and self.has(namespace, page.key):
                    self._found(namespace, page.key, now_s, out)

    def _loaded(self, slots: list[int], now_s: float, out: list[Action]) -> None:
        for slot in slots:
            self._demotions.loaded(slot)
        self._on_commit(slots, now_s, out)

    def committed(self, slots: Sequence[int]) -> None:
        """A client wrote the pages in these slots."""
        if self.any:
            self._demotions.committed(slots)

    def configured(self, namespace: int, space: int, facts: SpaceFacts) -> None:
        """The namespace was opened with this space, or its settings changed."""
        if self.any:
            self._index.set_space(namespace, space, [])
            if self._facts.get(namespace) != facts:
                self._facts[namespace] = facts
                self._opened.append(OpenSpace(space, facts))
            if self._demotions.unwanted(namespace):
                self._unwanted.add(namespace)

    def begin(self, get: PendingGet, missing: Sequence[int], now_s: float, out: list[Action]) -> list[int]:
        """See `pending_gets.Source`."""
        return self._promotions.begin(get, missing, now_s, out) if self.any else list(missing)

    def leave(self, get: PendingGet, *, late: bool) -> None:
        """See `pending_gets.Source`."""
        if self.any:
            self._promotions.leave(get, late=late)

    def give_way(self, namespace: int, key: bytes, out: list[Action]) -> bool:
        """Whether a load of the page is under way that is late, and is void from now on: see `Promotions`."""
        return self.any and self._promotions.give_way(namespace, key, out)

    def load_ahead(self, namespace: int, keys: Sequence[bytes], out: list[Action]) -> None:
        """See `Promotions.ahead`."""
        if self.any:
            self._promotions.ahead(namespace, keys, out)

    # for pages that other nodes own: implements ownership.TierPages

    @property
    def ready(self) -> bool:
        """Whether the tiers have reported all their pages."""
        return self._index.ready

    @property
    def behind(self) -> bool:
        """Whether the tiers are slower than the writers at present."""
        return self.any and self._demotions.behind

    @property
    def free_bytes(self) -> int:
        """Bytes that the tiers can take without dropping a page."""
        return sum(max(0, tier.capacity_bytes - tier.used_bytes) for tier in self.status())

    def namespaces(self) -> list[int]:
        return self._index.namespaces()

    def keys(self, namespace: int) -> list[bytes]:
        """The keys of all pages in tiers, in a new list."""
        return self._index.keys(namespace)

    def own_keys(self, namespace: int) -> list[bytes]:
        return self._index.keys(namespace, own=True)

    def disown(self, namespace: int, keys: Sequence[bytes], out: list[Action]) -> None:
        if self.any and keys:
            self._demotions.forget(namespace, keys, out, own=True)

    def held(self, namespace: int) -> tuple[int, int]:
        """(pages, bytes) of the namespace in all tiers."""
        return self._index.page_count(namespace), self._index.page_bytes(namespace)

    def length(self, namespace: int, key: bytes) -> int:
        return self._index.find(namespace, key)[1]

    def place(self, namespace: int, key: bytes) -> tuple[str, int]:
        """(name of the first tier that has the page, its length in bytes), or ("", 0)."""
        number, length_bytes = self._index.find(namespace, key)
        return (self._index.tiers[number].spec.name, length_bytes) if length_bytes else ("", 0)

    def forget(self, namespace: int, keys: Sequence[bytes], out: list[Action]) -> None:
        """Drop pages from all tiers."""
        if self.any and keys:
            self._demotions.forget(namespace, keys, out)

    def erase(self, namespace: int, keys: Sequence[bytes] | None, ticket: int, out: list[Action]) -> None:
        """Erase the bytes of pages that nobody is to find any more; None: of all, before `clear`."""
        if self.any:
            self._stop(namespace, out)
            if keys is not None:
                self._demotions.forget(namespace, keys, out)
            asked = None if keys is None else tuple(keys)
            out.append(ErasePages(ticket, self._index.space_of(namespace), asked))

    def clear(self, namespace: int, space: int | None, out: list[Action]) -> int:
        """Void all pages of the namespace and return their number. `space`: its new space; None: dropped."""
        if not self.any:
            return 0
        self._stop(namespace, out)
        count = self._index.set_space(namespace, space, out)
        facts = self._facts.pop(namespace, None)
        if space is not None and facts is not None:
            self._facts[namespace] = facts
            out.append(OpenSpace(space, facts))
        return count

    def _stop(self, namespace: int, out: list[Action]) -> None:
        """Void the stores and loads in progress for the namespace."""
        self._promotions.clear(namespace, out)
        self._demotions.clear(namespace)

    def pump(self, now_s: float, out: list[Action]) -> None:
        """Start the stores that are due. Called after all other decisions."""
        out += self._opened
        self._opened.clear()
        for namespace in self._unwanted:
            if self._demotions.unwanted(namespace):  # it is not gone meanwhile
                self._stop(namespace, out)
                space = self._index.space_of(namespace)
                self._index.forget_space(space, out)
                out.append(OpenSpace(space, self._facts[namespace]))  # its settings may change again
        self._unwanted.clear()
        if self.any and self._demotions.due:
            self._demotions.pump(now_s, out)

    @property
    def next_deadline_s(self) -> float:
        """The next deadline of the tiers. Deadlines of waiting Gets belong to their sessions."""
        return self._demotions.next_deadline_s()

    # --- status, conservation

    def status(self) -> list[TierStatus]:
        """The status of each tier, top tier first."""
        return [tier.status() for tier in self._index.tiers]

    def counters(self) -> dict[str, int]:
        if not self.any:
            return {}
        return {"evicted_unwritten": self._demotions.evicted_unwritten, **self._promotions.counters()}

    def reserved_slots(self) -> list[int]:
        """The slots that are being filled from a tier."""
        return self._promotions.reserved_slots()

    def waited_for(self, get: PendingGet) -> int:
        """How many pages of the Get are being loaded. For tests."""
        return self._promotions.waited_for(get)

    def check(self) -> None:
        """Assert the invariants. Slow: for tests."""
        self._index.check()
        self._demotions.check()
        self._promotions.check()


SHARED_BYTES: Final = 16


def facts_of(namespace: Namespace) -> SpaceFacts:
    """Its pages have the same bytes on all nodes that have its name, geometry and generation. A dropped
    namespace that comes back has another generation.
    """
    identity = msgspec.json.encode([namespace.name, sorted(namespace.geometry.items()), namespace.generation])
    shared = hashlib.blake2b(identity, digest_size=SHARED_BYTES).hexdigest()
    return SpaceFacts(namespace.name, shared, item_bytes(namespace.geometry))
