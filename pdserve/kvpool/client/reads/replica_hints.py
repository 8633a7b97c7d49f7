"""A client's hints about hot pages: the number of replicas that their owners reported. Pure.

Many reads of one page would overload its owner, so they are spread. Each read goes to the less loaded of two
holders (owner or replica) chosen at random. Hints are bounded in number and expire, so a client regularly
asks the owner again.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.kvpool.cluster.ring import Ring

MAX_HINTS: Final = 65_536  # 4 million tokens of hot prefixes; about 20 MB
HINT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Reads:
    """The results of a batch of reads, by index of the key."""

    keys: Sequence[bytes]
    found: Sequence[bool]
    first_asked: Sequence[str]
    last_asked: Sequence[str]
    replicas: Mapping[int, int]  # index of a page that was read -> number of replicas known to the node


class HotPages:
    """Keys of hot pages, each with its number of replicas. Not thread-safe."""

    def __init__(self, rng: random.Random, max_hints: int = MAX_HINTS, hint_s: float = HINT_S) -> None:
        self._random = rng
        self._max_hints = max_hints
        self._hint_s = hint_s
        self._hints: dict[bytes, tuple[int, float]] = {}  # -> (replicas, end of the hint), oldest first

    def __len__(self) -> int:
        return len(self._hints)

    def note(self, key: bytes, replicas: int, now_s: float) -> None:
        """The owner reported this number of replicas. 0: the page is not hot any more."""
        self._hints.pop(key, None)
        if replicas > 0:
            if len(self._hints) >= self._max_hints:
                del self._hints[next(iter(self._hints))]
            self._hints[key] = (replicas, now_s + self._hint_s)

    def forget(self, key: bytes) -> None:
        """A replica did not have the page: drop the hint."""
        self._hints.pop(key, None)

    def replicas(self, key: bytes, now_s: float) -> int:
        """Number of nodes after the owner that hold the page, as far as known."""
        hint = self._hints.get(key)
        if hint is None:
            return 0
        if hint[1] <= now_s:
            del self._hints[key]
            return 0
        return hint[0]

    def spread(
        self,
        keys: Sequence[bytes],
        owners: Mapping[str, Sequence[int]],
        ring: Ring,
        load_bytes: Mapping[str, int],
        page_bytes: int,
        now_s: float,
    ) -> dict[str, list[int]]:
        """Indices of keys by the node to read from, with hot pages divided between their holders.

        `load_bytes`: for each node that is up, the bytes being read from it.
        """
        loads = dict(load_bytes)
        chosen: dict[str, list[int]] = {}
        for owner, places in owners.items():
            for place in places:
                node, copies = owner, self.replicas(keys[place], now_s)
                if copies:
                    successors = [one.node for one in ring.successors(keys[place], copies + 1)]
                    holders = [node for node in successors if node in load_bytes] or [owner]
                    node = choose(holders, loads, self._random.random(), self._random.random())
                    loads[node] = loads.get(node, 0) + page_bytes
                chosen.setdefault(node, []).append(place)
        return chosen

    def learn(self, reads: Reads, owners: Mapping[str, Sequence[int]], now_s: float) -> int:
        """Update the hints from a batch of reads. Returns the number of pages that replicas served."""
        served = 0
        for owner, places in owners.items():
            for place in places:
                if reads.last_asked[place] == owner:
                    if reads.first_asked[place] != owner:
                        self.forget(reads.keys[place])
                    if place in reads.replicas:
                        self.note(reads.keys[place], reads.replicas[place], now_s)
                elif reads.first_asked[place] != owner:
                    served += reads.found[place]
        return served


def choose(holders: Sequence[str], load_bytes: Mapping[str, int], first: float, second: float) -> str:
    """The less loaded of two holders, drawn by two random numbers in [0, 1).

    `holders` is not empty, and the owner is first. Source: Mitzenmacher, "The power of two choices", 2001.
    """
    count = len(holders)
    one = int(first * count)
    other = (one + 1 + int(second * (count - 1))) % count if count > 1 else one
    return min(holders[one], holders[other], key=lambda node: load_bytes.get(node, 0))
