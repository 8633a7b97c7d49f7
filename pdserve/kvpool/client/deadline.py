"""The deadline of an operation of a pool client. Pure.

A node that is being upgraded returns soon, with all its pages. An operation that ended before would be a
needless miss. So an announced restart extends the deadline by `restart_wait_s`, once for any number of nodes.
With the defaults a read or a write then ends within 8 s. SGLang grants a storage backend 10 s.
"""

from __future__ import annotations


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
