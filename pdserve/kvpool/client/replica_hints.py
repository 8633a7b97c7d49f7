"""Which pages are hot, as a client remembers it: their owners said how many other nodes hold them. Pure.

A page that many want would keep one node busy. Its readers spread: each read goes to the owner or one of the
replicas, of two chosen at random the one that has less to do for us. What is remembered is bounded and ends
by itself, so that an owner is asked again now and then and can say otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

MAX_HINTS: Final = 65_536  # 4 million tokens of hot prefixes; some 20 MB
HINT_S: Final = 10.0


class HotPages:
    """Keys, each with how many replicas it has. Not thread-safe."""

    def __init__(self, max_hints: int = MAX_HINTS, hint_s: float = HINT_S) -> None:
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


def choose(holders: Sequence[str], load_bytes: Mapping[str, int], first: float, second: float) -> str:
    """Of two holders, chosen by two random numbers in [0, 1), the less loaded; the owner comes first in
    `holders`, which is not empty. (The power of two choices: Mitzenmacher 2001.)
    """
    count = len(holders)
    one = int(first * count)
    other = (one + 1 + int(second * (count - 1))) % count if count > 1 else one
    return min(holders[one], holders[other], key=lambda node: load_bytes.get(node, 0))
