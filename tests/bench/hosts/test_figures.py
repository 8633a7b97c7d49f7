"""Figures from turns, and what a run complains of."""

from __future__ import annotations

from typing import Any

from benchmarks.hosts.figures import HostsFigures, figures_of
from benchmarks.hosts.talk import Turn


def turn(sent_s: float, **more: Any) -> Turn:
    given = {
        "done_s": sent_s + 1.0,
        "first_s": sent_s + 0.1,
        "error": "",
        "detail": "",
        "worker": "w",
        "moved": False,
        "known_words": 100,
        "cached_words": 100,
        "is_right": True,
    }
    return Turn(sent_s=sent_s, **{**given, **more})


def figures(*turns: Turn, harmless: bool = False) -> HostsFigures:
    """Of a fault from 10 to 20, and a pause to 40."""
    return figures_of(turns, "loss", "some", "tcp", (10.0, 20.0), 40.0, harmless=harmless)


def test_turns_count_where_they_were_under_way() -> None:
    found = figures(
        turn(8.9, error="status 503"),
        turn(9.9, first_s=10.2),
        turn(19.9, done_s=29.9, error="cut off", detail="x", worker="", moved=True),
        turn(20.0, error="status 503"),  # it may still be recovering
        turn(30.0, cached_words=50),
        turn(39.9, error="status 503"),  # of what came next
    )
    assert (found.seconds, found.turns, found.failed, found.failed_after) == (10.0, 2, 1, 0)
    assert (found.longest_s, found.hit, found.hit_after, found.moved) == (10.0, 1.0, 0.5, 0)
    assert found.errors == {"cut off: x": 1}
    assert found.complaints == ["the hit rate stayed low"]


def test_a_fault_may_cost_requests_and_hits_and_an_upgrade_may_not() -> None:
    turns = turn(11.0, error="cut off"), turn(12.0, cached_words=0), turn(35.0)
    assert figures(*turns).passed
    assert figures(*turns, harmless=True).complaints == ["a request failed", "the hit rate fell"]
    assert figures(*turns, turn(36.0, error="x")).complaints == ["a request failed after it"]
    assert figures(*turns, turn(13.0, is_right=False)).complaints == ["an answer was wrong"]


def test_nothing_asked_is_no_figure_of_success() -> None:
    assert not figures().passed
