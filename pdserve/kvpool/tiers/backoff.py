"""The pause before the next write to a tier after a failed write. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FIRST_S: Final = 1.0  # the first pause; it doubles with each failure in a row
MAX_S: Final = 60.0
MAX_DOUBLINGS: Final = 6  # enough to reach MAX_S; it bounds the exponent


@dataclass(slots=True)
class Backoff:
    """`failures`: failed writes in a row; 0: the tier works, as far as known.

    Failures before `retry_at_s` come from writes that began before the first failure. They count as one.
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
