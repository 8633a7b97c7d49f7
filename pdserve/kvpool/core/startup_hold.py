"""Requests for pages that a node does not know of yet: it has just started, and its tiers are still telling
what they hold. Pure.

What is in memory is served from the first moment. What is not there may be below: "no" would be a guess, and
after an upgrade a miss that clients were promised not to see. So such an Exists or Get waits until the tiers
have told everything, at most half as long as a read waits for its pages from a tier (with the defaults 0.5 s,
of the 1 s that a client grants a lookup), and only in a node's first moments: a tier that takes minutes to
tell must not cost each lookup that much.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from pdserve.kvpool.core.events import Received

PATIENCE_SHARE: Final = 0.5  # of what a read waits for a tier
WINDOW_SHARE: Final = 3.0  # of the same: from the start on
MAX_HELD: Final = 256  # more are answered at once


class StartupHold:
    """Requests that wait, oldest first."""

    def __init__(self, started_s: float, promotion_timeout_s: float, *, tiers: bool) -> None:
        """`tiers`: there are any."""
        self.open = tiers  # some have yet to tell
        self._patience_s = PATIENCE_SHARE * promotion_timeout_s
        self._until_s = started_s + WINDOW_SHARE * promotion_timeout_s
        self._held: deque[tuple[float, Received]] = deque()  # and when it is to be answered

    @property
    def next_deadline_s(self) -> float:
        return self._held[0][0] if self._held else float("inf")

    def hold(self, event: Received, now_s: float) -> bool:
        """Whether the request waits now."""
        if now_s >= self._until_s or len(self._held) >= MAX_HELD:
            return False
        self._held.append((now_s + self._patience_s, event))
        return True

    def due(self, now_s: float) -> list[Received]:
        """Take out those that have waited long enough."""
        found = []
        while self._held and self._held[0][0] <= now_s:
            found.append(self._held.popleft()[1])
        return found

    def end(self) -> list[Received]:
        """The tiers have told everything: take out all."""
        self.open = False
        return self.due(float("inf"))

    def gone(self, connection: int) -> None:
        """Its client went."""
        if self._held:
            self._held = deque(held for held in self._held if held[1].connection != connection)
