"""pdserve.kvpool.core.tiering.tier_index."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from pdserve.kvpool.tiers.backoff import Backoff

Write: TypeAlias = Literal["cold", "all"]


class TierSpec(msgspec.Struct, frozen=True):
    """A tier as its node's configuration names it, from the top down."""

    name: str
    kind: str
    capacity_bytes: int
    write: Write = "cold"  # of the first


class TieringLimits(msgspec.Struct, frozen=True):
    """Bounds of what is under way between arena and tiers."""

    watermark: float = 0.8  # of the arena; above it the coldest pages are written
    store_pages: int = 256
    store_bytes: int = 64 << 20  # one page at least
    load_bytes: int = 256 << 20
    promotion_timeout_s: float = 1.0


@dataclass(slots=True)
class TierIndex:
    """What is in one tier, as far as we know: lengths by namespace and key."""

    spec: TierSpec
    pages: dict[int, dict[bytes, int]] = field(default_factory=dict)
    page_bytes: dict[int, int] = field(default_factory=dict)  # by namespace
    ready: bool = False  # all that survived was reported
    used_bytes: int = 0  # as the tier last said
    largest_bytes: int = 1 << 62  # pages of this length were refused
    backoff: Backoff = field(default_factory=Backoff)
    stored: int = 0
    store_failed: int = 0
    gone: int = 0

    def add(self, namespace: int, key: bytes, length_bytes: int) -> None:
        pages = self.pages.setdefault(namespace, {})
        old = pages.get(key, 0)
        pages[key] = length_bytes
        self.page_bytes[namespace] = self.page_bytes.get(namespace, 0) + length_bytes - old

    def remove(self, namespace: int, key: bytes) -> bool:
        pages = self.pages.get(namespace)
        length = pages.pop(key, None) if pages else None
        if length is None:
            return False
        self.page_bytes[namespace] -= length
        return True

    def clear(self, namespace: int) -> int:
        self.page_bytes.pop(namespace, None)
        return len(self.pages.pop(namespace, ()))

    def __len__(self) -> int:
        return sum(map(len, self.pages.values()))
