"""What the clients saw while something befell the hosts. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from benchmarks.hosts.talk import Turn

HIT_GOAL = 0.95
"""Of the words of earlier turns, what is found in the pool while no page is lost."""


class HostsFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of the turns that were under way meanwhile; `after`: of those in the second half of the pause after."""

    fault: str
    what: str
    harmless: bool
    """No request may fail, and the hit rate must be kept."""
    path: str
    """Between hosts: ucx or tcp."""
    seconds: float
    turns: int
    failed: int
    errors: dict[str, int]
    wrong_answers: int
    first_token_p50_ms: float
    first_token_p99_ms: float
    longest_s: float
    hit: float
    """Of the words that the turn before left in full pages: the share that was found in the pool."""
    moved: int
    """Turns that another worker answered than the one before."""
    failed_after: int
    hit_after: float

    @property
    def complaints(self) -> list[str]:
        """What must not have been."""
        found = {
            "an answer was wrong": self.wrong_answers,
            "a request failed": self.harmless and self.failed,
            "the hit rate fell": self.harmless and self.hit < HIT_GOAL,
            "a request failed after it": self.failed_after,
            "the hit rate stayed low": self.hit_after < HIT_GOAL,
        }
        return [why for why, holds in found.items() if holds]

    @property
    def passed(self) -> bool:
        return not self.complaints

    @property
    def cells(self) -> tuple[str, ...]:
        """Of a row of a table."""
        return (
            *(self.fault, f"{self.turns:,}", str(self.failed), f"{self.first_token_p50_ms:.0f}"),
            *(f"{self.first_token_p99_ms:.0f}", f"{self.longest_s:.1f}", f"{self.hit:.1%}", str(self.moved)),
            *(str(self.failed_after), f"{self.hit_after:.1%}"),
        )


def figures_of(
    turns: Sequence[Turn],
    fault: str,
    what: str,
    path: str,
    span: tuple[float, float],
    until_s: float,
    *,
    harmless: bool,
) -> HostsFigures:
    """`span`: begin and end of the fault; `until_s`: end of the pause after it."""
    begun_s, ended_s = span
    asked = [turn for turn in turns if turn.sent_s < ended_s and turn.done_s > begun_s]
    recovered_s = (ended_s + until_s) / 2
    after = [turn for turn in turns if recovered_s <= turn.sent_s and turn.done_s <= until_s]
    first_ms = [(turn.first_s - turn.sent_s) * 1e3 for turn in asked if turn.first_s is not None]
    p50, p99 = (float(np.percentile(first_ms, share)) if first_ms else 0.0 for share in (50, 99))
    errors = Counter(f"{turn.error}: {turn.detail}"[:120] for turn in asked if turn.error)
    return HostsFigures(
        fault=fault,
        what=what,
        harmless=harmless,
        path=path,
        seconds=round(ended_s - begun_s, 1),
        turns=len(asked),
        failed=errors.total(),
        errors=dict(errors.most_common(5)),
        wrong_answers=sum(not turn.is_right for turn in asked + after),
        first_token_p50_ms=round(p50, 1),
        first_token_p99_ms=round(p99, 1),
        longest_s=round(max((turn.done_s - turn.sent_s for turn in asked), default=0.0), 2),
        hit=_hit(asked),
        moved=sum(turn.moved and not turn.error for turn in asked),
        failed_after=sum(bool(turn.error) for turn in after),
        hit_after=_hit(after),
    )


def _hit(turns: Sequence[Turn]) -> float:
    known = sum(turn.known_words for turn in turns if not turn.error)
    found = sum(turn.cached_words for turn in turns if not turn.error)
    return round(found / known, 4) if known else 0.0
