"""Least frequently used, with ageing: evict the page with the fewest uses; of equals, the least recently
used.

A list per frequency makes every step O(1) (Shah, Mitra, Matani: An O(1) algorithm for implementing the LFU
cache eviction scheme, 2010). Without ageing a page that was hot once would stay for ever. So all frequencies
are halved after every `WINDOW` uses per page held: TinyLFU's reset (Einziger, Friedman, Manes: TinyLFU, ACM
Transactions on Storage 13(4), 2017). Halving joins list 2f+1 to the end of list 2f. This keeps the order of
the pages held, and reduces their lead over new pages. It is O(1), because there are 64 lists. A slot's word
has its frequency, and the number of halvings when it was written: so no slot needs a visit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from pdserve.kvpool.policies.base import NONE, LinkedList, Links, Slots, Times

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
