"""A token bucket that can go into debt. Pure.

A request is admitted if the bucket holds its estimated use, or is full and the request is larger. The
estimate is charged at once, and the difference to the real use at the end of the request. So the level can
fall below zero. Then the tenant waits until the debt is refilled. In any time t a tenant gets at most
`capacity + rate * t` tokens and one request more.
"""

from __future__ import annotations


class TokenBucket:
    """A bucket that holds at most `capacity` and gains `rate_s` per second."""

    __slots__ = ("at_s", "capacity", "level", "rate_s")

    def __init__(self, rate_s: float, capacity: float, now_s: float) -> None:
        self.rate_s = rate_s
        self.capacity = capacity
        self.level = capacity
        self.at_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until the bucket holds `amount`, or is full if `amount` exceeds its capacity."""
        self._refill(now_s)
        missing = min(amount, self.capacity) - self.level
        return missing / self.rate_s if missing > 1e-9 * self.capacity else 0.0

    def held(self, now_s: float) -> float:
        """What the bucket holds now. Negative: a debt."""
        self._refill(now_s)
        return self.level

    def charge(self, amount: float, now_s: float) -> None:
        """Take `amount`; the level may fall below zero. A negative amount is returned to the bucket."""
        self._refill(now_s)  # before the charge: a past overflow must not pay for later use
        self.level = min(self.capacity, self.level - amount)

    def resized(self, rate_s: float, capacity: float, now_s: float) -> None:
        """Change rate and capacity from now on. A debt stays."""
        self._refill(now_s)
        self.rate_s, self.capacity = rate_s, capacity
        self.level = min(self.level, capacity)

    def _refill(self, now_s: float) -> None:
        if now_s > self.at_s:
            self.level = min(self.capacity, self.level + (now_s - self.at_s) * self.rate_s)
            self.at_s = now_s
