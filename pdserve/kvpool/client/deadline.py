"""When an operation of a pool client must be done. Pure.

A node that says it is being upgraded is back in a moment, with all its pages: an operation that gave up then
would be a miss for nothing. So it may take longer by the configured `restart_wait_s`, in all, however many
nodes restart meanwhile, and only if one did. With the defaults a read or a write ends within 8 s then, of the
10 s that SGLang grants a storage backend.
"""

from __future__ import annotations


class Deadline:
    """Shared by the parts of one operation, on whatever threads."""

    __slots__ = ("_latest_s", "at_s")

    def __init__(self, at_s: float, restart_wait_s: float = 0.0) -> None:
        """`at_s`: of time.monotonic()."""
        self.at_s = at_s
        self._latest_s = at_s + restart_wait_s

    def put_off(self) -> None:
        """A node that the operation needs is being upgraded. Idempotent."""
        self.at_s = self._latest_s
