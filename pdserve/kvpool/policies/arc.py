"""Adaptive replacement: learns from its mistakes how much room recency gets, and how much frequency.

ARC (Megiddo, Modha: ARC: A Self-Tuning, Low Overhead Replacement Cache, FAST 2003). Pages used once are in
T1, pages used again in T2. B1 and B2 remember the keys of pages evicted from each (ghosts). A page that comes
back while B1 remembers it shows that T1 was too small; with B2, that T2 was. `target`, the wanted size of T1,
moves accordingly. So a scan passes through T1 and leaves T2 alone.

The paper's cache has c pages. Here c is the number of pages held at the moment. The paper adapts before it
evicts. Here a slot is found when a page is reserved, and the policy learns the page when it is committed. So
the target moves for the next eviction.

Bounds, as in the paper: |T1| + |B1| <= c, |T1| + |T2| + |B1| + |B2| <= 2c.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from pdserve.kvpool.policies.base import NONE, Links, Slots, Times

_ONCE: Final = 0
_AGAIN: Final = 1


class Arc:
    """An EvictionPolicy; beside the links 4 bytes per page, and a ghost per page, of 37 bytes, at most."""

    def __init__(self, links: Links) -> None:
        self._words = links.words  # which of the two lists the slot is in
        self._ghosts = links.ghosts
        self._owner = self._ghosts.new_owner()
        self._pages = (links.new_list(), links.new_list())  # T1, T2, used longest ago first
        self._gone = (self._ghosts.new_list(), self._ghosts.new_list())  # B1, B2, evicted longest ago first
        self._target = 0.0

    def on_insert(self, slot: int, key: bytes, now_s: float) -> None:
        which = _ONCE
        ghost = self._ghosts.find(self._owner, key)
        if ghost != NONE:
            which = _AGAIN
            self._adapt(ghost)
        self._words[slot] = which
        self._pages[which].append(slot)
        self._trim(len(self))

    def on_hit(self, slot: int, now_s: float) -> None:
        if self._words[slot] == _AGAIN:
            self._pages[_AGAIN].move_to_end(slot)
        else:
            self._pages[_ONCE].remove(slot)
            self._pages[_AGAIN].append(slot)
            self._words[slot] = _AGAIN

    def on_demote(self, slot: int) -> None:
        """The first of T1, which `target` may spare for a while."""
        self._pages[self._words[slot]].remove(slot)
        self._words[slot] = _ONCE
        self._pages[_ONCE].prepend(slot)
        self._trim(len(self))

    def on_evict(self, slot: int, key: bytes) -> None:
        pages = len(self)
        which = self._words[slot]
        self._pages[which].remove(slot)
        self._ghosts.add(self._owner, key, which, self._gone[which])
        self._trim(pages)

    def on_remove(self, slot: int) -> None:
        self._pages[self._words[slot]].remove(slot)
        self._trim(len(self))

    def victims(self) -> Iterator[int]:
        once, again = iter(self._pages[_ONCE]), iter(self._pages[_AGAIN])
        left, left_again = len(self._pages[_ONCE]), len(self._pages[_AGAIN])
        while left or left_again:
            if left and (left > self._target or not left_again):
                left -= 1
                yield next(once)
            else:
                left_again -= 1
                yield next(again)

    def restore(self, slots: Slots, inserted_s: Times) -> None:
        """Uses before the restart are not known: all pages count as used once."""
        self._pages[_ONCE].extend(np.asarray(slots, dtype=np.int32))
        np.frombuffer(self._words, np.uint32)[np.asarray(slots, dtype=np.int64)] = _ONCE

    def close(self) -> None:
        for ghosts in self._gone:
            self._ghosts.forget_all(ghosts)

    def __len__(self) -> int:
        return len(self._pages[_ONCE]) + len(self._pages[_AGAIN])

    def _adapt(self, ghost: int) -> None:
        """An evicted page is back: its list should have been longer. Forget its ghost."""
        kind = self._ghosts.kind(ghost)
        step = max(len(self._gone[1 - kind]) / len(self._gone[kind]), 1.0)
        if kind == _ONCE:
            self._target = min(self._target + step, len(self) + 1.0)
        else:
            self._target = max(self._target - step, 0.0)
        self._ghosts.forget(ghost, self._gone[kind])

    def _trim(self, pages: int) -> None:
        """Forget the oldest ghosts beyond the bounds for `pages` pages."""
        gone_once, gone_again = self._gone
        while len(gone_once) and len(self._pages[_ONCE]) + len(gone_once) > pages:
            self._ghosts.forget(gone_once.head, gone_once)
        while len(gone_again) and len(self) + len(gone_once) + len(gone_again) > 2 * pages:
            self._ghosts.forget(gone_again.head, gone_again)
