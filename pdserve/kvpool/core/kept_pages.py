"""Pages that clients want kept for a while, in memory, or gone first. Pure.

A kept page counts as just read, again and again, until its time is over. So eviction by use takes others
first. Nothing is pinned: where all other pages are gone, kept ones go too, and no writer fails because of
them. Orders of eviction that do not look at reads (fifo, ttl) do not keep anything.

Pages that clients want gone are evicted before others, unless they are kept, or read once more. Those that
they want in memory are loaded from the tiers (`Promotions.ahead`).

Bounds: the bytes of all kept pages together, their number, and the pages that one tick touches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from pdserve.kvpool.core.events import Action
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.core.tiering.coordinator import Tiers
from pdserve.kvpool.protocol.messages import DOWN, MAX_KEEP_S, MAX_KEPT_KEYS, UP, Exists
from pdserve.kvpool.protocol.slot_table import COMMITTED

TOUCH_S: Final = 5.0
"""Each kept page is touched once in this time."""
TOUCHED_AT_ONCE: Final = 256
"""About 0.2 ms of a node's time."""
MAX_KEPT: Final = 50_000


class KeptPages:
    """All kept pages of a node."""

    def __init__(self, store: PageStore, tiers: Tiers, max_bytes: int) -> None:
        self._store = store
        self._tiers = tiers
        self._max_bytes = max_bytes
        self._until: OrderedDict[int, tuple[int, float, int]] = OrderedDict()
        """Slot → (sequence of its page, when its time is over, bytes of the slot then); the one touched
        longest ago first.
        """
        self.slot_bytes = 0
        """Of all kept pages."""
        self.refused = 0
        """Pages that were to be kept beyond a bound."""
        self.next_deadline_s = float("inf")

    def __len__(self) -> int:
        return len(self._until)

    def ask(self, request: Exists, now_s: float, out: list[Action], *, may_write: bool) -> None:
        """Do with the pages that a request names what it says."""
        find = self._store.index.namespace(request.namespace).lookup(now_s)
        keys = list(dict.fromkeys(request.keys[:MAX_KEPT_KEYS]))
        if request.move == UP:
            self._tiers.load_ahead(request.namespace, keys, out)
        if may_write:
            slots = [slot for key in keys if (slot := find(key)) is not None]
            if request.keep_s:
                self.keep(slots, request.keep_s, now_s)
            if request.move == DOWN:
                self._store.demote([slot for slot in slots if slot not in self._until])

    def keep(self, slots: Sequence[int], keep_s: float, now_s: float) -> None:
        """Keep the committed pages in these slots for `keep_s` from now on, whatever was said before. Not
        above 0 or no number: no longer.
        """
        until_s = now_s + min(keep_s, MAX_KEEP_S)
        for slot in slots:
            self._forget(slot)
            slot_bytes = self._store.slots.slot_bytes(slot)
            if not until_s > now_s:
                continue
            if len(self._until) >= MAX_KEPT or self.slot_bytes + slot_bytes > self._max_bytes:
                self.refused += 1
                continue
            self._until[slot] = self._store.facts.sequence[slot], until_s, slot_bytes
            self.slot_bytes += slot_bytes
            self._touch(slot, now_s)
        if self._until and self.next_deadline_s == float("inf"):
            self.next_deadline_s = now_s + self._pause_s()

    def tick(self, now_s: float) -> None:
        """Touch those whose turn it is, and forget those whose time is over or whose page is gone."""
        if now_s < self.next_deadline_s:
            return
        for slot in [slot for slot, _ in zip(self._until, range(TOUCHED_AT_ONCE), strict=False)]:
            sequence, until_s, _ = self._until[slot]
            if until_s > now_s and self._is_there(slot, sequence):
                self._until.move_to_end(slot)
                self._touch(slot, now_s)
            else:
                self._forget(slot)
        self.next_deadline_s = now_s + self._pause_s() if self._until else float("inf")

    def _is_there(self, slot: int, sequence: int) -> bool:
        return self._store.states[slot] == COMMITTED and self._store.facts.sequence[slot] == sequence

    def _touch(self, slot: int, now_s: float) -> None:
        pages = self._store.index.namespace(self._store.facts.namespace[slot])
        self._store.touch(pages, self._store.slots.slot_bytes(slot), [slot], now_s)

    def _forget(self, slot: int) -> None:
        if (known := self._until.pop(slot, None)) is not None:
            self.slot_bytes -= known[2]

    def _pause_s(self) -> float:
        return TOUCH_S * min(1.0, TOUCHED_AT_ONCE / len(self._until))
