"""The deadline of an operation of a pool client, and what can be done until then. Pure.

A node that is being upgraded returns soon, with all its pages. An operation that ended before would be a
needless miss. So an announced restart extends the deadline by `restart_wait_s`, once for any number of nodes.
With the defaults a read or a write then ends within 8 s. SGLang grants a storage backend 10 s.
"""

from __future__ import annotations

from typing import Final

LEAST_BYTES: Final = 256 * 1024
WEIGHT: Final = 0.25  # of the newest piece
RESERVE: Final = 1.5


class Deadline:
    """Shared by the parts of one operation, on any thread."""

    __slots__ = ("_latest_s", "at_s")

    def __init__(self, at_s: float, restart_wait_s: float = 0.0) -> None:
        """`at_s`: a time of time.monotonic()."""
        self.at_s = at_s
        self._latest_s = at_s + restart_wait_s

    def put_off(self) -> None:
        """Extend the deadline, since a node that the operation needs is being upgraded. Idempotent."""
        self.at_s = self._latest_s


class Speed:
    """How fast pieces of pages were moved lately, connections beside each other included.

    Threads may lose an update of another: a guess of the time needs no lock.
    """

    __slots__ = ("_bytes_s",)

    def __init__(self) -> None:
        self._bytes_s = 0.0  # 0: unknown

    def learn(self, size_bytes: int, spent_s: float) -> None:
        """A piece was moved. Small pieces say little of the speed and are passed over."""
        if size_bytes < LEAST_BYTES or spent_s <= 0:
            return
        seen = size_bytes / spent_s
        self._bytes_s = seen if not self._bytes_s else self._bytes_s + WEIGHT * (seen - self._bytes_s)

    def allows(self, size_bytes: int, left_s: float) -> bool:
        """Whether a piece would be done in `left_s`, with some reserve. Without experience it is tried."""
        return size_bytes < LEAST_BYTES or RESERVE * size_bytes <= self._bytes_s * left_s or not self._bytes_s
