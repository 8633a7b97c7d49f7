"""Which pages are hot, as a client remembers it: their owners said how many other nodes hold them. Pure.

A page that many clients read would keep one node busy, so its reads are spread. Each read goes to the less
loaded of two holders (owner or replica) chosen at random. Hints are bounded in number and expire, so an owner
is asked again now and then and can say otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.kvpool.cluster.ring import Ring

MAX_HINTS: Final = 65_536  # 4 million tokens of hot prefixes; some 20 MB
HINT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Reads:
    """What became of a batch of reads; lists by place."""

    keys: Sequence[bytes]
    found: Sequence[bool]
    first_asked: Sequence[str]
    last_asked: Sequence[str]
    replicas: Mapping[int, int]  # by place, for pages that were read: how many the node knows of


class HotPages:
    """Keys, each with how many replicas it has. Not thread-safe."""

    def __init__(self, rng: random.Random, max_hints: int = MAX_HINTS, hint_s: float = HINT_S) -> None:
        self._random = rng
        self._max_hints = max_hints
        self._hint_s = hint_s
        self._hints: dict[bytes, tuple[int, float]] = {}  # replicas, end; the oldest first

    def __len__(self) -> int:
        return len(self._hints)

    def note(self, key: bytes, replicas: int, now_s: float) -> None:
        """Its owner said so; 0: the page is not hot any more."""
        self._hints.pop(key, None)
        if replicas > 0:
            if len(self._hints) >= self._max_hints:
                del self._hints[next(iter(self._hints))]
            self._hints[key] = (replicas, now_s + self._hint_s)

    def forget(self, key: bytes) -> None:
        """A replica did not have it."""
        self._hints.pop(key, None)

    def replicas(self, key: bytes, now_s: float) -> int:
        """How many nodes after its owner hold the page, as far as we know."""
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
        """Places by the node to read them from, hot pages divided between their holders. `load_bytes`: of
        each node that is up, how much is being read from it.
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
        """Note what owners said of the pages that they served, and which replicas were missing; how many
        pages replicas served.
        """
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
    """Of two holders, chosen by two random numbers in [0, 1), the less loaded; the owner comes first in
    `holders`, which is not empty. (The power of two choices: Mitzenmacher 2001.)
    """
    count = len(holders)
    one = int(first * count)
    other = (one + 1 + int(second * (count - 1))) % count if count > 1 else one
    return min(holders[one], holders[other], key=lambda node: load_bytes.get(node, 0))
