"""Deadlines of everything in flight, checked by one timer.

A timer per wait costs more than the wait's other work on the hot path. Here whoever waits carries
`deadline_s`, a plain attribute; one sweep every `TICK_S` looks at all of them and expires those that are past
it. Precision is one tick, which is below what any of the router's deadlines is about. So the time of the last
sweep, `now_s`, is near enough to set one by.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Protocol

TICK_S = 0.05


class Watched(Protocol):
    """Something with a deadline on the loop's clock."""

    @property
    def deadline_s(self) -> float:
        """When."""
        ...

    def expire(self) -> None:
        """The deadline has passed. Must not raise; is called again while it waits."""
        ...


class Deadlines:
    """Not thread-safe: one event loop owns it."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, others: Callable[[], Collection[Watched]] = list
    ) -> None:
        """`others`: who waits besides those in `watched`."""
        self.loop = loop
        self.now_s = loop.time()
        """On the loop's clock, at most a tick ago where the loop is not held up."""
        self.watched: set[Watched] = set()
        """Whoever waits adds itself, and discards itself on every path."""
        self._others = others
        self._timer: asyncio.TimerHandle | None = loop.call_later(TICK_S, self._sweep)

    def __len__(self) -> int:
        return len(self.watched) + len(self._others())

    def close(self) -> None:
        """Stop the timer; nothing expires any more."""
        self.watched.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        self._timer = self.loop.call_later(TICK_S, self._sweep)
        self.now_s = now_s = self.loop.time()
        for one in [one for one in (*self.watched, *self._others()) if one.deadline_s <= now_s]:
            if one.deadline_s <= now_s:  # the expiry of one may end another
                one.expire()
