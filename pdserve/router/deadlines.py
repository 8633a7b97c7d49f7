"""Deadlines of everything in flight, checked by one timer.

A timer per wait costs more than the wait's other work on the hot path. Here whoever waits carries
`deadline_s`, a plain attribute; one sweep every `TICK_S` expires those that are past it. Precision is one
tick, which is below what any of the router's deadlines is about. The timer runs only while something is
watched.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

TICK_S = 0.05


class Watched(Protocol):
    """Something with a deadline on the loop's clock."""

    deadline_s: float

    def expire(self) -> None:
        """The deadline has passed. Must not raise; may be called again while it stays watched."""
        ...


class Deadlines:
    """The set of watched things. Not thread-safe: one event loop owns it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._watched: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, item: Watched) -> None:
        """Watch `item` until it is discarded."""
        self._watched.add(item)
        if self._timer is None:
            self._timer = self.loop.call_later(TICK_S, self._sweep)

    def discard(self, item: Watched) -> None:
        """No longer watch `item`."""
        self._watched.discard(item)

    def close(self) -> None:
        """Stop the timer; nothing expires any more."""
        self._watched.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        now_s = self.loop.time()
        for item in [item for item in self._watched if item.deadline_s <= now_s]:
            item.expire()
        self._timer = self.loop.call_later(TICK_S, self._sweep) if self._watched else None
