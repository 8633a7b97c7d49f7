"""Whether pages that the pool has are read, or computed again. Pure.

Reading is right almost always. It is not where the way to a node is slow and the model small: then a prompt
is computed before its pages are here. The speed of the way is known from reads alone, so now and then one is
tried.
"""

from __future__ import annotations

from typing import Final

TRY_EVERY_S: Final = 5.0
"""A way that was slow is tried again after this time."""


class ReadOrCompute:
    """The rule of one worker."""

    def __init__(self, compute_tokens_s: float, page_tokens: int) -> None:
        """`compute_tokens_s`: prompt tokens that the worker computes in a second; 0: it always reads."""
        self._compute_tokens_s = compute_tokens_s
        self._page_tokens = page_tokens
        self._tried_at_s = float("-inf")

    def reads(self, pages: int, read_s: float, now_s: float) -> bool:
        """Whether so many pages are read. `read_s`: how long that should take; 0: unknown."""
        if not self._compute_tokens_s or read_s <= pages * self._page_tokens / self._compute_tokens_s:
            return True
        if now_s - self._tried_at_s < TRY_EVERY_S:
            return False
        self._tried_at_s = now_s
        return True
