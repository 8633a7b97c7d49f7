"""How long a tier that failed to write is left alone. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FIRST_S: Final = 1.0  # twice as long after each failure in a row
MAX_S: Final = 60.0
MAX_DOUBLINGS: Final = 6  # enough to reach MAX_S; a broken disk may fail any number of times


@dataclass(slots=True)
class Backoff:
    """`failures` in a row; 0: it works, as far as we know. What fails before `retry_at_s` was under way with
    what failed first, and counts as one failure with it.
    """

    failures: int = 0
    retry_at_s: float = 0.0

    def failed(self, now_s: float) -> None:
        """A write failed."""
        if now_s < self.retry_at_s:
            return
        doublings = min(self.failures, MAX_DOUBLINGS)
        self.failures += 1
        self.retry_at_s = now_s + min(MAX_S, FIRST_S * 2**doublings)

    def worked(self) -> None:
        """A write succeeded."""
        self.failures = 0
        self.retry_at_s = 0.0
