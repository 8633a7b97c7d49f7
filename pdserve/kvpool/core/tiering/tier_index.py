"""The node's index of its tiers' pages. Pure.

It is made from the tiers' reports. It may list a page that the tier has lost; reading it is a miss. A page
counts only in the current space of its namespace (namespaces/catalog.py). After a clear or drop, reports
about the old space are ignored.

A tier may hang: a mount whose server is gone answers nothing, for hours. A page whose load is late is taken
out of the tier's index, and comes back with the load's end. `LATE_LOADS` of them in a row stall the tier:
until a load of it ends it counts as having nothing, and nothing is stored in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, Literal, TypeAlias

import msgspec

from pdserve.kvpool.core.events import Action, ForgetPages, ForgetSpace
from pdserve.kvpool.core.store.index import NONE
from pdserve.kvpool.protocol.cluster_messages import TierStatus
from pdserve.kvpool.tiers.base import Backoff, PageName

Write: TypeAlias = Literal["cold", "all"]
_NO_SPACE: Final = -1
LATE_LOADS: Final = 8  # none of whose tier ended in between


class TierSpec(msgspec.Struct, frozen=True):
    """A configured tier. Tiers are numbered from the top."""

    name: str
    kind: str
    capacity_bytes: int
    write: Write = "cold"  # used for the first tier only
    shared: bool = False  # all nodes of the pool have its pages


class TieringLimits(msgspec.Struct, frozen=True):
    """Bounds of stores and loads between arena and tiers."""

    watermark: float = 0.8  # used share of the arena above which the coldest pages are stored
    store_pages: int = 256
    store_bytes: int = 64 << 20  # but at least one page
    load_bytes: int = 256 << 20
    promotion_timeout_s: float = 1.0


@dataclass(slots=True)
class TierIndex:
    """The pages in one tier: lengths in bytes by space and key."""

    spec: TierSpec
    pages: dict[int, dict[bytes, int]] = field(default_factory=dict)
    page_bytes: dict[int, int] = field(default_factory=dict)  # by space
    ready: bool = False  # the tier has reported all pages that survived
    used_bytes: int = 0  # as the tier last reported
    largest_bytes: int = 1 << 62  # the tier refused pages of this length
    backoff: Backoff = field(default_factory=Backoff)
    late: int = 0  # loads that became late since the last one ended
    stalled: bool = False
    stalls: int = 0
    stored: int = 0
    store_failed: int = 0
    gone: int = 0
    changed: Callable[[int, bytes], object] | None = None  # called for each that came or went: space, key
    lost: Callable[[int, bytes], object] | None = None  # called for each that went

    def add(self, space: int, key: bytes, length_bytes: int) -> None:
        pages = self.pages.setdefault(space, {})
        old = pages.get(key, 0)
        pages[key] = length_bytes
        self.page_bytes[space] = self.page_bytes.get(space, 0) + length_bytes - old
        if self.changed is not None:
            self.changed(space, key)

    def remove(self, space: int, key: bytes) -> bool:
        """Remove a page. True if it was there."""
        pages = self.pages.get(space)
        length = pages.pop(key, None) if pages else None
        if length is None:
            return False
        self.page_bytes[space] -= length
        if self.changed is not None:
            self.changed(space, key)
        if self.lost is not None:
            self.lost(space, key)
        return True

    def clear(self, space: int) -> int:
        """Remove all pages of the space. Returns their number."""
        self.page_bytes.pop(space, None)
        return len(self.pages.pop(space, ()))

    def status(self) -> TierStatus:
        return TierStatus(
            name=self.spec.name,
            kind=self.spec.kind,
            capacity_bytes=self.spec.capacity_bytes,
            used_bytes=self.used_bytes,
            pages=len(self),
            writable=not (self.backoff.failures or self.stalled),
            counters={
                "stored": self.stored,
                "store_failed": self.store_failed,
                "gone": self.gone,
                "stalls": self.stalls,
            },
        )

    def __len__(self) -> int:
        return sum(map(len, self.pages.values()))


class TierIndexes:
    """The indexes of all tiers of a node, top tier first, with namespaces mapped to spaces."""

    def __init__(self, tiers: Sequence[TierSpec]) -> None:
        self.tiers = [TierIndex(spec) for spec in tiers]
        self._spaces: dict[int, int] = {}  # by namespace
        self._namespaces: dict[int, int] = {}  # by space
        self._on_change: Callable[[int, bytes | None], None] | None = None
        self.on_loss: Callable[[int | None, bytes], None] = lambda namespace, key: None
        """Called with namespace and key of a page that a tier cannot give any more; None: many may be."""
        self.on_damage: Callable[[int, bytes], None] = lambda namespace, key: None
        """Called with namespace and key of a page of which a tier's copy turned out to be of no use."""
        for tier in self.tiers:
            tier.lost = self._lost

    def _lost(self, space: int, key: bytes) -> None:
        namespace = self._namespaces.get(space)
        if namespace is not None:
            self.on_loss(namespace, key)

    @property
    def ready(self) -> bool:
        """Whether the tiers have reported all their pages."""
        return all(tier.ready for tier in self.tiers)

    def find(self, namespace: int, key: bytes, above: int = -1) -> tuple[int, int]:
        """(number, length) of the first tier below tier `above` that can give the page, or (NONE, 0)."""
        space = self._spaces.get(namespace, _NO_SPACE)
        for number in range(above + 1, len(self.tiers)):
            tier = self.tiers[number]
            pages = tier.pages.get(space)
            if pages is not None and key in pages and not tier.stalled:
                return number, pages[key]
        return NONE, 0

    def has(self, namespace: int, key: bytes) -> bool:
        """Whether any tier can give the page."""
        return self.find(namespace, key)[0] != NONE

    def space_of(self, namespace: int) -> int:
        """The space of an open namespace."""
        return self._spaces[namespace]

    def namespace_of(self, space: int) -> int | None:
        """The namespace whose current space this is, or None."""
        return self._namespaces.get(space)

    def namespaces(self) -> list[int]:
        """The namespaces that have pages in a tier."""
        spaces = {space for tier in self.tiers for space, pages in tier.pages.items() if pages}
        return sorted(self._namespaces[space] for space in spaces)

    def keys(self, namespace: int, *, own: bool = False) -> list[bytes]:
        """The keys of the namespace's pages in any tier, each once. `own`: without those of shared tiers."""
        space = self._spaces.get(namespace, _NO_SPACE)
        tiers = [tier for tier in self.tiers if not (tier.stalled or (own and tier.spec.shared))]
        # without a step of Python per page, where one tier has them all: 10 million are copied in the loop
        held = [pages for tier in tiers if (pages := tier.pages.get(space))]
        return list(held[0]) if len(held) == 1 else list(dict.fromkeys(chain.from_iterable(held)))

    def page_count(self, namespace: int) -> int:
        """Number of the namespace's pages in all tiers. A page in two tiers counts twice."""
        space = self._spaces.get(namespace, _NO_SPACE)
        return sum(len(tier.pages.get(space, ())) for tier in self.tiers)

    def page_bytes(self, namespace: int) -> int:
        """Bytes of the namespace's pages in all tiers. A page in two tiers counts twice."""
        space = self._spaces.get(namespace, _NO_SPACE)
        return sum(tier.page_bytes.get(space, 0) for tier in self.tiers)

    # --- changes

    def follow(self, on_change: Callable[[int, bytes | None], None]) -> None:
        """Call `on_change(namespace, key)` for each page that comes into a tier or leaves it. None: all pages
        of the namespace left.
        """

        def changed(space: int, key: bytes) -> None:
            namespace = self._namespaces.get(space)
            if namespace is not None:
                on_change(namespace, key)

        self._on_change = on_change
        for tier in self.tiers:
            tier.changed = changed

    def late(self, number: int, page: PageName) -> None:
        """A load of the page from the tier is late: the tier may hang."""
        tier = self.tiers[number]
        tier.remove(page.space, page.key)
        tier.late += 1
        if tier.late >= LATE_LOADS:
            self.stall(number)

    def stall(self, number: int) -> None:
        """The tier counts as having nothing from now on."""
        tier = self.tiers[number]
        if not tier.stalled:
            tier.stalled, tier.stalls = True, tier.stalls + 1
            self._all_changed(tier)
            self.on_loss(None, b"")

    def answered(self, number: int) -> None:
        """A load from the tier ended, well or not: it does not hang."""
        tier = self.tiers[number]
        tier.late = 0
        if tier.stalled:
            tier.stalled = False
            self._all_changed(tier)

    def late_loaded(self, number: int, page: PageName) -> None:
        """The tier gave the page after all."""
        if page.space in self._namespaces:
            self.tiers[number].add(page.space, page.key, page.length_bytes)

    def _all_changed(self, tier: TierIndex) -> None:
        for space, pages in tier.pages.items() if self._on_change is not None else ():
            if pages and space in self._namespaces and self._on_change is not None:
                self._on_change(self._namespaces[space], None)

    def set_space(self, namespace: int, space: int | None, out: list[Action]) -> int:
        """Set the namespace's current space; None: it is gone.

        Pages in its earlier space are forgotten. Returns their number.
        """
        old = self._spaces.pop(namespace, None)
        count = 0
        if old is not None and old != space:
            count = self.forget_space(old, out)
            del self._namespaces[old]
        if space is not None:
            self._spaces[namespace] = space
            self._namespaces[space] = namespace
        return count

    def forget_space(self, space: int, out: list[Action]) -> int:
        """Forget all pages of the space. Returns their number."""
        out.append(ForgetSpace(space))
        count = sum(tier.clear(space) for tier in self.tiers)
        if count:
            self.on_loss(None, b"")
        namespace = self._namespaces.get(space)
        if count and namespace is not None and self._on_change is not None:
            self._on_change(namespace, None)
        return count

    def forget(
        self,
        namespace: int,
        keys: Sequence[bytes],
        out: list[Action],
        only: int | None = None,
        *,
        own: bool = False,
    ) -> None:
        """Forget these pages in every tier, in the tier `only`, or (`own`) in those that are not shared."""
        space = self._spaces.get(namespace, _NO_SPACE)
        for number, tier in enumerate(self.tiers if space != _NO_SPACE else ()):
            if own and tier.spec.shared:
                continue
            if only is None or number == only:
                lengths = tier.pages.get(space, {})
                names = tuple(PageName(space, key, lengths.get(key, 0)) for key in keys)
                for key in keys:
                    tier.remove(space, key)
                out.append(ForgetPages(number, names))

    def check(self) -> None:
        """Assert that what is counted is there. Slow: for tests."""
        assert {space: number for number, space in self._spaces.items()} == self._namespaces
        for tier in self.tiers:
            for space, pages in tier.pages.items():
                assert tier.page_bytes.get(space, 0) == sum(pages.values())
                assert not pages or space in self._namespaces
