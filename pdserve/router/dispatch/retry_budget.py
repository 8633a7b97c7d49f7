"""A budget for retries: when much fails, trying everything twice would only double the load.

Every request pays in `ratio` of a retry, time pays in `min_per_s`, a retry costs 1; at most ten seconds' and
a hundred requests' worth is kept. So with few failures every one is retried, and when all workers fail the
added load stays near `ratio`. Source: retry budgets of Finagle, https://twitter.github.io/finagle/guide/
"""

from __future__ import annotations

RATIO = 0.2
MIN_PER_S = 10.0
KEPT_S = 10.0
KEPT_REQUESTS = 100


class RetryBudget:
    """Retries that may be made now."""

    def __init__(self, ratio: float, min_per_s: float, now_s: float) -> None:
        self._ratio = ratio
        self._min_per_s = min_per_s
        self._most = min_per_s * KEPT_S + ratio * KEPT_REQUESTS
        self._balance = min_per_s * KEPT_S
        self._paid_s = now_s

    @property
    def balance(self) -> float:
        """Retries left, as of the last call."""
        return self._balance

    def on_request(self) -> None:
        """A request was begun."""
        self._balance = min(self._most, self._balance + self._ratio)

    def take(self, now_s: float) -> bool:
        """Whether a retry may be made now; it is then paid for."""
        self._balance = min(self._most, self._balance + (now_s - self._paid_s) * self._min_per_s)
        self._paid_s = now_s
        if self._balance < 1:
            return False
        self._balance -= 1
        return True
