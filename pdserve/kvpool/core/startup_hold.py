"""Lookups that a node holds back after its start, while its tiers still report their pages. Pure.

Pages in memory are served at once. A page that is not in memory may be in a tier that has not reported it
yet. After an upgrade clients must not see such a miss. So an Exists or Get for such a page is held until the
tiers have reported all their pages.

It is held for half the time that a read waits for a tier: 0.5 s by default, of the 1 s that clients grant a
lookup. And it is held in the node's first moments only: a tier that needs minutes must not delay every
lookup.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from pdserve.kvpool.core.events import Received

HOLD_SHARE: Final = 0.5  # of the time that a read waits for a tier
WINDOW_SHARE: Final = 3.0  # of the same time, from the start on
MAX_HELD: Final = 256  # further requests are answered at once


class StartupHold:
    """Requests that are held, oldest first."""

    def __init__(self, started_s: float, promotion_timeout_s: float, *, tiers: bool) -> None:
        """`tiers`: whether the node has tiers."""
        self.open = tiers  # a tier has not reported all its pages
        self._hold_s = HOLD_SHARE * promotion_timeout_s
        self._until_s = started_s + WINDOW_SHARE * promotion_timeout_s
        self._held: deque[tuple[float, Received]] = deque()  # (time of the answer, request)

    @property
    def next_deadline_s(self) -> float:
        return self._held[0][0] if self._held else float("inf")

    def hold(self, event: Received, now_s: float) -> bool:
        """Hold the request; False when it must be answered now."""
        if now_s >= self._until_s or len(self._held) >= MAX_HELD:
            return False
        self._held.append((now_s + self._hold_s, event))
        return True

    def due(self, now_s: float) -> list[Received]:
        """Take out the requests that have waited long enough."""
        found = []
        while self._held and self._held[0][0] <= now_s:
            found.append(self._held.popleft()[1])
        return found

    def end(self) -> list[Received]:
        """The tiers have reported everything: take out all."""
        self.open = False
        return self.due(float("inf"))

    def gone(self, connection: int) -> None:
        """The client disconnected."""
        if self._held:
            self._held = deque(held for held in self._held if held[1].connection != connection)
