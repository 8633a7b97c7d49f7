"""The orders of eviction.

**Lru**, least recently used: evict the page whose last read or write is the oldest. **Fifo**, first in, first
out: evict the page that was committed first; being read does not help it.

**Lfu**, least frequently used, with ageing: evict the page with the fewest uses; of equals, the least
recently used. A list per frequency makes every step O(1) (Shah, Mitra, Matani: An O(1) algorithm for
implementing the LFU cache eviction scheme, 2010). Without ageing a page that was hot once would stay for
ever. So all frequencies are halved after every `WINDOW` uses per page held: TinyLFU's reset (Einziger,
Friedman, Manes: TinyLFU, ACM Transactions on Storage 13(4), 2017). Halving joins list 2f+1 to the end of list
2f. This keeps the order of the pages held, and reduces their lead over new pages. It is O(1), because there
are 64 lists. A slot's word has its frequency, and the number of halvings when it was written: so no slot
needs a visit.

**Arc**, adaptive replacement, learns from its mistakes how much room recency gets, and how much frequency
(Megiddo, Modha: ARC: A Self-Tuning, Low Overhead Replacement Cache, FAST 2003). Pages used once are in
T1, pages used again in T2. B1 and B2 remember the keys of pages evicted from each (ghosts). A page that comes
back while B1 remembers it shows that T1 was too small; with B2, that T2 was. `target`, the wanted size of T1,
moves accordingly. So a scan passes through T1 and leaves T2 alone.

The paper's cache has c pages. Here c is the number of pages held at the moment. The paper adapts before it
evicts. Here a slot is found when a page is reserved, and the policy learns the page when it is committed. So
the target moves for the next eviction.

Bounds, as in the paper: |T1| + |B1| <= c, |T1| + |T2| + |B1| + |B2| <= 2c.

**Ttl**, time to live: evict the page that expires first, and say which have expired. A page expires `ttl_s`
after its commit, read or not. All pages of a policy live equally long, so they expire in the order of their
commits: a list whose head expires first. A page from another node has lived there for a part of its time. If
it expires before the end of the list, it is in a sorted list beside it.

The store keeps one of these beside another policy, where a namespace has a time to live.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import merge
from typing import Final

import numpy as np

from pdserve.kvpool.policies.base import NONE, LinkedList, Links, Slots, Times


class Lru:
    """An EvictionPolicy; a linked list in order of last use. No memory beside the links."""

    def __init__(self, links: Links) -> None:
        self._order = links.new_list()

    def on_insert(self, slot: int, key: bytes, now_s: float) -> None:
        self._order.append(slot)

    def on_hit(self, slot: int, now_s: float) -> None:
        self._order.move_to_end(slot)

    def on_demote(self, slot: int) -> None:
        self._order.remove(slot)
        self._order.prepend(slot)

    def on_evict(self, slot: int, key: bytes) -> None:
        self._order.remove(slot)

    def on_remove(self, slot: int) -> None:
        self._order.remove(slot)

    def victims(self) -> Iterator[int]:
        return iter(self._order)

    def restore(self, slots: Slots, inserted_s: Times) -> None:
        self._order.extend(np.asarray(slots, dtype=np.int32))

    def close(self) -> None:
        pass

    def __len__(self) -> int:
        return len(self._order)


class Fifo(Lru):
    """An EvictionPolicy; a linked list in order of commit. No memory beside the links."""

    def on_hit(self, slot: int, now_s: float) -> None:
        pass


MAX_FREQUENCY: Final = 63
WINDOW: Final = 8  # uses per page held from one halving to the next
MIN_USES: Final = 512  # between two halvings, also with few pages
_BITS: Final = 6
_EPOCHS: Final = 1 << (32 - _BITS)


class Lfu:
    """An EvictionPolicy; 4 bytes per page beside the links."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._lists = self._empty_lists()  # by frequency
        self._words = links.words  # halvings seen (26 bits), frequency then (6 bits)
        self._halvings = 0
        self._uses = 0  # since the last halving
        self._length = 0

    def on_insert(self, slot: int, key: bytes, now_s: float) -> None:
        self._length += 1
        self._put(slot, 1)

    def on_hit(self, slot: int, now_s: float) -> None:
        frequency = self._frequency(slot)
        self._lists[frequency].remove(slot)
        self._put(slot, min(frequency + 1, MAX_FREQUENCY))

    def on_demote(self, slot: int) -> None:
        self._lists[self._frequency(slot)].remove(slot)
        self._lists[0].prepend(slot)
        self._words[slot] = self._word(0)

    def on_evict(self, slot: int, key: bytes) -> None:
        self.on_remove(slot)

    def on_remove(self, slot: int) -> None:
        self._length -= 1
        self._lists[self._frequency(slot)].remove(slot)

    def victims(self) -> Iterator[int]:
        for pages in self._lists:
            if pages.head != NONE:
                yield from pages

    def restore(self, slots: Slots, inserted_s: Times) -> None:
        self._length = len(slots)
        self._lists[1].extend(np.asarray(slots, dtype=np.int32))
        np.frombuffer(self._words, np.uint32)[np.asarray(slots, dtype=np.int64)] = self._word(1)

    def close(self) -> None:
        pass

    def __len__(self) -> int:
        return self._length

    def _put(self, slot: int, frequency: int) -> None:
        self._lists[frequency].append(slot)
        self._words[slot] = self._word(frequency)
        self._uses += 1
        if self._uses >= max(MIN_USES, WINDOW * self._length):
            self._halve()

    def _empty_lists(self) -> list[LinkedList]:
        return [self._links.new_list() for _ in range(MAX_FREQUENCY + 1)]

    def _word(self, frequency: int) -> int:
        return (self._halvings % _EPOCHS) << _BITS | frequency

    def _frequency(self, slot: int) -> int:
        word = self._words[slot]
        return (word & MAX_FREQUENCY) >> min((self._halvings - (word >> _BITS)) % _EPOCHS, _BITS)

    def _halve(self) -> None:
        lists, self._lists = self._lists, self._empty_lists()
        for frequency, pages in enumerate(lists):
            self._lists[frequency >> 1].take_all(pages)
        self._halvings += 1
        self._uses = 0


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


class Ttl(Fifo):
    """An EvictionPolicy; 8 bytes per page beside the links."""

    def __init__(self, links: Links, ttl_s: float) -> None:
        super().__init__(links)
        self.ttl_s = ttl_s
        self._end_s = links.times_s
        self._early: list[tuple[float, int]] = []  # end, slot; ascending

    def on_insert(self, slot: int, key: bytes, now_s: float) -> None:
        end_s = self._end_s[slot] = now_s + self.ttl_s
        if len(self._order) and end_s < self._end_s[self._order.tail]:
            insort(self._early, (end_s, slot))
        else:
            self._order.append(slot)

    def on_demote(self, slot: int) -> None:
        pass

    def on_evict(self, slot: int, key: bytes) -> None:
        self.on_remove(slot)

    def on_remove(self, slot: int) -> None:
        entry = self._end_s[slot], slot
        place = bisect_left(self._early, entry)
        if place < len(self._early) and self._early[place] == entry:
            del self._early[place]
        else:
            self._order.remove(slot)

    def victims(self) -> Iterator[int]:
        if not self._early:
            return iter(self._order)
        return merge((slot for _, slot in self._early), self._order, key=self._end_s.__getitem__)

    def __len__(self) -> int:
        return len(self._order) + len(self._early)

    def has_ended(self, slot: int, now_s: float) -> bool:
        """Whether the slot's page has expired. The policy must hold the slot."""
        return self._end_s[slot] <= now_s

    def ended(self, now_s: float) -> Iterator[int]:
        """The expired slots, the first to expire first. A change of the policy ends the iterator."""
        for slot in self.victims():
            if self._end_s[slot] > now_s:
                return
            yield slot

    @property
    def next_end_s(self) -> float:
        """When the next page expires; infinite when there is none."""
        head = self._order.head
        end_s = float("inf") if head == NONE else self._end_s[head]
        return min(end_s, self._early[0][0]) if self._early else end_s

    def restore(self, slots: Slots, inserted_s: Times) -> None:
        super().restore(slots, inserted_s)
        np.frombuffer(self._end_s)[np.asarray(slots, dtype=np.int64)] = inserted_s + self.ttl_s
