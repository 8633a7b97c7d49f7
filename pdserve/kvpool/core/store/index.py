"""The index of pages in slots. Pure; about 200 bytes per page in total, O(1) lookups at any size.

`Index` maps (namespace, key) to a slot. Pages being written are in a table of their own, so that no lookup
finds a page before its commit. Other facts of a slot lie in typed arrays by slot number (`Facts`): a Python
object per page would take more memory than all of this.

**Kin** are parts of one page that are of no use without each other, and so are evicted together. Of some
models a page has parts with keys of their own (`pages.PagePart`). These keys begin alike, so all parts of a
page are at one node, and it sees which belong together (`pages.pool_key`):

    evicted                                             goes with it
    a part that all pages of a prefix need (KV, drafts) every part of its page, at all ranks
    a part that is needed at a prefix's end (a window)  the same part of its page at the other ranks

The other way round a window takes no KV with it: longer prefixes need that, and not the window. A page that
a tier has is not lost, and takes nothing with it. Nor does a page that its writer discards: its readers
compute it, and write it again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from pdserve.kvpool.policies import KEEP, make_policy
from pdserve.kvpool.policies.base import EvictionPolicy, Links
from pdserve.kvpool.policies.orders import Ttl
from pdserve.pages import KIN_BYTES

MAX_KIN: Final = 256
"""Parts of a page at all ranks. Clients choose keys: of more that begin alike no others are found."""


class Kin:
    """The committed pages of one namespace by what their keys begin with. `key_of`: of each slot."""

    def __init__(self, key_of: Sequence[bytes | None]) -> None:
        self._key_of = key_of
        self._slots: dict[bytes, list[int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._slots.values()))

    def add(self, key: bytes, slot: int) -> None:
        """The page was committed."""
        slots = self._slots.setdefault(key[:KIN_BYTES], [])
        if len(slots) < MAX_KIN:
            slots.append(slot)

    def remove(self, key: bytes, slot: int) -> None:
        """The page is gone."""
        slots = self._slots.get(key[:KIN_BYTES], [])
        if slot in slots:
            slots.remove(slot)
        if not slots:
            self._slots.pop(key[:KIN_BYTES], None)

    def of(self, key: bytes) -> list[int]:
        """The slots of pages that are of no use without this one, it among them."""
        group = key[KIN_BYTES]
        slots = self._slots.get(key[:KIN_BYTES], [])
        return [slot for slot in slots if not group or (self._key_of[slot] or key)[KIN_BYTES] == group]


NONE: Final = -1
REASONS: Final = ("capacity", "quota", "slab", "ttl", "dropped")  # why a page was removed


class Facts:
    """Facts of each slot, by slot number. Meaningless where the slot is free."""

    def __init__(self, slots: int) -> None:
        self.key: list[bytes | None] = [None] * slots  # the same object as in the index
        self.namespace = array("I", bytes(4 * slots))
        self.length_bytes = array("I", bytes(4 * slots))
        self.checksum = array("Q", bytes(8 * slots))
        self.sequence = array("Q", bytes(8 * slots))
        self.last_use = array("Q", bytes(8 * slots))  # by the store's counter of uses
        self.committed_s = array("d", bytes(8 * slots))


class Family:
    """A namespace and those of its tenants, which share its quotas."""

    def __init__(self) -> None:
        self.members: list[NamespacePages] = []
        self.quota_bytes: int | None = None
        self.tier_quota_bytes = 0

    @property
    def slot_bytes(self) -> int:
        return sum(pages.slot_bytes for pages in self.members)


class NamespacePages:
    """The pages of one namespace, their orders of eviction, and its limits.

    `slot_bytes` counts all of its slots, whatever their state (RESERVED, QUARANTINED, COMMITTED, DOOMED).
    """

    __slots__ = (
        "committed",
        "expiry",
        "family",
        "gone",
        "hits",
        "kin",
        "misses",
        "number",
        "operations",
        "orders",
        "page_bytes",
        "policy",
        "quota_bytes",
        "read_bytes",
        "slot_bytes",
        "space",
        "tier_hits",
        "writing",
        "written",
        "written_bytes",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.space = number  # in its rows of the slot table; a new one after each clear
        self.committed: dict[bytes, int] = {}
        self.writing: dict[bytes, int] = {}
        self.page_bytes = 0  # of the committed pages
        self.slot_bytes = 0
        self.hits = 0
        self.tier_hits = 0  # of the hits: pages that came up from a tier for it
        self.misses = 0
        self.gone = dict.fromkeys(REASONS, 0)  # pages removed, by reason
        self.operations = 0  # requests for it, refused ones included
        self.read_bytes = 0  # of the hits
        self.written = 0  # pages committed
        self.written_bytes = 0
        self.policy = "lru"
        self.quota_bytes: int | None = None
        self.orders: dict[int, EvictionPolicy] = {}  # by size class
        self.expiry: Ttl | None = None  # of all committed pages, where pages expire
        self.kin: Kin | None = None  # where pages have several parts
        self.family: Family | None = None  # where it has tenants, or is a tenant's

    @property
    def ttl_s(self) -> float | None:
        return None if self.expiry is None else self.expiry.ttl_s

    @property
    def is_kept(self) -> bool:
        """None of its pages is evicted."""
        return self.policy == KEEP

    @property
    def evictions(self) -> int:
        """Pages removed to make room."""
        return self.gone["capacity"] + self.gone["quota"] + self.gone["slab"]

    def lookup(self, now_s: float) -> Callable[[bytes], int | None]:
        """A function that finds slots of committed pages that have not expired. Valid for one request."""
        expiry, committed = self.expiry, self.committed
        if expiry is None:
            return committed.get

        def find(key: bytes) -> int | None:
            slot = committed.get(key)
            return None if slot is None or expiry.has_ended(slot, now_s) else slot

        return find

    def order(self, slot_bytes: int, links: Links) -> EvictionPolicy:
        """The order of eviction of one size class. The first call makes it, empty."""
        order = self.orders.get(slot_bytes)
        if order is None:
            order = self.orders[slot_bytes] = make_policy(self.policy, links, self.ttl_s)
        return order


class Index:
    """(namespace number, key) -> slot."""

    def __init__(self) -> None:
        self._namespaces: dict[int, NamespacePages] = {}

    def namespace(self, number: int) -> NamespacePages:
        """Its pages. The first call makes them, empty."""
        pages = self._namespaces.get(number)
        if pages is None:
            pages = self._namespaces[number] = NamespacePages(number)
        return pages

    def get(self, number: int) -> NamespacePages | None:
        """Its pages; None when it never had any, or was dropped."""
        return self._namespaces.get(number)

    def forget(self, number: int) -> None:
        """Remove a namespace without pages."""
        pages = self._namespaces.pop(number, None)
        if pages is not None and pages.family is not None:
            pages.family.members.remove(pages)
        assert pages is None or not (pages.committed or pages.writing)

    def find(self, number: int, key: bytes) -> int:
        """The slot of the committed page, or NONE."""
        pages = self._namespaces.get(number)
        return NONE if pages is None else pages.committed.get(key, NONE)

    def orders(self, slot_bytes: int) -> list[EvictionPolicy]:
        """The orders of all namespaces whose pages may be evicted, for one size class."""
        return [
            pages.orders[slot_bytes]
            for pages in self._namespaces.values()
            if slot_bytes in pages.orders and not pages.is_kept
        ]

    def __len__(self) -> int:
        return sum(len(pages.committed) for pages in self._namespaces.values())

    def __iter__(self) -> Iterator[NamespacePages]:
        return iter(self._namespaces.values())
