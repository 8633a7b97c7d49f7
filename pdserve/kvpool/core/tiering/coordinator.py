"""All that NodeState has to do with the tiers below memory: pages down (tiering.py), pages up (promotion.py).
Pure. Without tiers it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from pdserve.kvpool.core.events import Action, PagesFound, PagesGone, PagesLoaded, PagesStored
from pdserve.kvpool.core.sessions import Session
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.core.tiering.demotion import Tiering
from pdserve.kvpool.core.tiering.promotion import PinPage, Promotions
from pdserve.kvpool.core.tiering.tier_index import TieringLimits, TierSpec
from pdserve.kvpool.protocol.cluster_messages import NamespaceSettings, TierStatus
from pdserve.kvpool.protocol.messages import Get, Pin

TierEvent: TypeAlias = PagesFound | PagesStored | PagesGone | PagesLoaded
Found: TypeAlias = Callable[[int, bytes, float, list[Action]], None]
OnCommit: TypeAlias = Callable[[list[int], float, list[Action]], None]


class Tiers:
    """`settings(namespace)`: what it wants, None when it is gone. `pin` gives a page to a
    client; `on_commit(slots, now_s, out)` and `found(namespace, key, now_s, out)` are called for pages that
    can be read from now on: those that came up, those that a tier turned out to have.
    """

    def __init__(
        self,
        store: PageStore,
        tiers: Sequence[TierSpec],
        limits: TieringLimits,
        settings: Callable[[int], NamespaceSettings | None],
        pin: PinPage,
        on_commit: OnCommit,
        found: Found,
    ) -> None:
        self._found = found
        self._tiering = Tiering(store, tiers, limits, settings)
        self._promotions = Promotions(store, self._tiering, limits, pin, on_commit)
        self._unwanted: set[int] = set()
        self.any = bool(tiers)

    # --- looking

    def has(self, namespace: int, key: bytes) -> bool:
        """Whether a tier has the page."""
        return self.any and self._tiering.has(namespace, key)

    # --- what happens

    def handle(self, event: TierEvent, now_s: float, out: list[Action]) -> None:
        if isinstance(event, PagesLoaded):
            self._promotions.loaded(event, now_s, out)
        elif isinstance(event, PagesStored):
            self._tiering.stored(event, now_s, out)
        elif isinstance(event, PagesGone):
            self._tiering.gone(event)
        else:
            self._tiering.found(event, now_s, out)
            for page in event.pages:
                if self.has(page.namespace, page.key):
                    self._found(page.namespace, page.key, now_s, out)

    def committed(self, slot: int) -> None:
        """A client wrote the page."""
        if self.any:
            self._tiering.committed(slot)

    def configured(self, namespace: int) -> None:
        """The namespace has other settings now."""
        if self.any and self._tiering.unwanted(namespace):
            self._unwanted.add(namespace)

    def get(
        self,
        session: Session,
        request: Get,
        pins: list[Pin],
        missing: list[int],
        now_s: float,
        out: list[Action],
    ) -> bool:
        """Load what a tier has of the pages at the places `missing`; whether the Get waits for any."""
        return self.any and self._promotions.begin(session, request, pins, missing, now_s, out)

    # what other nodes may own: see ownership.TierPages

    @property
    def ready(self) -> bool:
        return self._tiering.ready

    @property
    def behind(self) -> bool:
        """Whether the tiers cannot keep up for the moment."""
        return self.any and self._tiering.behind

    @property
    def free_bytes(self) -> int:
        """What the tiers have room for without dropping anything."""
        return sum(max(0, tier.capacity_bytes - tier.used_bytes) for tier in self.status())

    def namespaces(self) -> list[int]:
        return self._tiering.namespaces()

    def keys(self, namespace: int) -> list[bytes]:
        return self._tiering.keys(namespace)

    def length(self, namespace: int, key: bytes) -> int:
        return self._tiering.find(namespace, key)[1]

    def place(self, namespace: int, key: bytes) -> tuple[str, int]:
        """Name of the first tier that has the page, and its length; ("", 0) when none has."""
        number, length_bytes = self._tiering.find(namespace, key)
        return (self._tiering.tiers[number].spec.name, length_bytes) if length_bytes else ("", 0)

    def forget(self, namespace: int, keys: Sequence[bytes], out: list[Action]) -> None:
        """Drop pages from all tiers."""
        if self.any and keys:
            self._tiering.forget(namespace, keys, out)

    def clear(self, namespace: int, *, dropped: bool, out: list[Action]) -> int:
        """Forget all pages of the namespace; how many."""
        if not self.any:
            return 0
        self._promotions.clear(namespace, out)
        return self._tiering.clear(namespace, dropped=dropped, out=out)

    def expire(self, session: Session, now_s: float, out: list[Action]) -> None:
        if session.gets:
            self._promotions.expire(session, now_s, out)

    def disconnected(self, session: Session) -> None:
        self._promotions.disconnected(session)

    def pump(self, now_s: float, out: list[Action]) -> None:
        """Start the stores that are due; called when everything else is decided."""
        for namespace in self._unwanted:
            self.clear(namespace, dropped=False, out=out)
        self._unwanted.clear()
        if self.any and self._tiering.due:
            self._tiering.pump(now_s, out)

    @property
    def next_deadline_s(self) -> float:
        """Of the tiers' own; Gets that wait are their sessions'."""
        return self._tiering.next_deadline_s()

    # --- status, conservation

    def status(self) -> list[TierStatus]:
        return self._tiering.status()

    def counters(self) -> dict[str, int]:
        if not self.any:
            return {}
        return {"evicted_unwritten": self._tiering.evicted_unwritten, **self._promotions.counters()}

    def reserved_slots(self) -> list[int]:
        """Those that are being filled from a tier."""
        return self._promotions.reserved_slots()

    def check(self) -> None:
        """Slow: for tests."""
        self._tiering.check()
        self._promotions.check()
