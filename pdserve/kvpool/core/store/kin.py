"""Parts of one page that are of no use without each other, and so are evicted together. Pure.

Of some models a page has parts with keys of their own (`pages.PagePart`). These keys begin alike, so all
parts of a page are at one node, and it sees which belong together (`pages.pool_key`):

    evicted                                             goes with it
    a part that all pages of a prefix need (KV, drafts) every part of its page, at all ranks
    a part that is needed at a prefix's end (a window)  the same part of its page at the other ranks

The other way round a window takes no KV with it: longer prefixes need that, and not the window. A page that
a tier has is not lost, and takes nothing with it. Nor does a page that its writer discards: its readers
compute it, and write it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

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
