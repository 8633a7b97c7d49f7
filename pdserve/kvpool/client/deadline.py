"""When an operation of a pool client must be done. Pure.

A node that says it is being upgraded is back in a moment, with all its pages. An operation that gave up then
would be a needless miss. So it may take `restart_wait_s` longer if a node restarts; once, however many do.
With the defaults a read or a write then ends within 8 s. SGLang grants a storage backend 10 s.
"""

from __future__ import annotations


class Deadline:
    """Shared by the parts of one operation, on any thread."""

    __slots__ = ("_latest_s", "at_s")

    def __init__(self, at_s: float, restart_wait_s: float = 0.0) -> None:
        """`at_s`: of time.monotonic()."""
        self.at_s = at_s
        self._latest_s = at_s + restart_wait_s

    def put_off(self) -> None:
        """A node that the operation needs is being upgraded. Idempotent."""
        self.at_s = self._latest_s
