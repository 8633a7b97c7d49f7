"""Random numbers that depend on a seed alone, on every machine and with every version of Python. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """BLAKE2b of the seed and a counter, 8 bytes at a time."""

    def __init__(self, *seed: int | str) -> None:
        self._seed = "/".join(map(str, seed)).encode()
        self._thrown = 0
        self._left = b""

    def below(self, limit: int) -> int:
        """0 to limit - 1; the bias is below limit / 2^64."""
        return self._number() % limit

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self._number() / 2**64

    def chance(self, probability: float) -> bool:
        return self._number() < probability * 2**64

    def choice(self, of: Sequence[T]) -> T:
        return of[self.below(len(of))]

    def shuffled(self, of: Sequence[T]) -> list[T]:
        """All of them in another order (Fisher and Yates)."""
        items = list(of)
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]
        return items

    def _number(self) -> int:
        if not self._left:
            counter = self._thrown.to_bytes(8, "little")
            self._left = hashlib.blake2b(counter, key=hashlib.blake2b(self._seed).digest()).digest()
            self._thrown += 1
        number = int.from_bytes(self._left[:8], "little")
        self._left = self._left[8:]
        return number
