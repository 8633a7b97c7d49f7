"""What a follower knows of its leader's pages: the newest news, for a while."""

from __future__ import annotations

import pytest

from pdserve.kvpool.hicache.ranks.follower import KEEP_S, Board, State
from pdserve.kvpool.hicache.ranks.messages import Begun, Ended, Place
from tests.support.kvpool.faulty import key

PLACE = Place("kv", 3, 7, b"")


def test_the_newest_news_of_a_page_count() -> None:
    board = Board()
    assert board.look(key(1), 0.0) is State.UNKNOWN
    board.hear(Begun([key(1), key(2)]), 0.0)
    assert board.look(key(1), 0.0) is State.READING
    board.hear(Ended([key(1), key(2)], [PLACE, None]), 1.0)
    assert board.look(key(1), 1.0) == PLACE
    assert board.look(key(2), 1.0) is State.MISSED
    board.hear(Begun([key(1)]), 2.0)
    assert board.look(key(1), 2.0) is State.READING


def test_old_news_are_forgotten() -> None:
    board = Board()
    board.hear(Ended([key(1)], [PLACE]), 0.0)
    board.hear(Begun([key(2)]), KEEP_S - 1)
    assert board.look(key(1), KEEP_S - 1) == PLACE
    assert board.look(key(1), KEEP_S) is State.UNKNOWN
    board.hear(Begun([key(3)]), KEEP_S)
    assert len(board) == 2


def test_the_newest_pages_are_kept_up_to_a_bound() -> None:
    board = Board(max_pages=10)
    for number in range(100):
        board.hear(Begun([key(number), key(number + 1)]), 0.0)
    assert len(board) == 10
    assert [board.look(key(n), 0.0) is State.READING for n in (90, 91, 100)] == [False, True, True]


def test_news_that_do_not_fit_together_are_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        Board().hear(Ended([key(1), key(2)], [None]), 0.0)
