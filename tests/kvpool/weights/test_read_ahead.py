"""Reading ahead: in order, bounded, with memory that is used again."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from pdserve.errors import WeightsError
from pdserve.kvpool.weights.manifest import Piece
from pdserve.kvpool.weights.streaming import Filled, Span, read_ahead

SIZE = 1000


class Reader:
    """Fills pages with the number in their key."""

    model = "demo@1"
    is_near = from_tiers = False

    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at = fails_at
        self.read_pages: list[int] = []
        self.has_read = threading.Condition()

    def read(self, path: str, pieces: Sequence[Piece], into: Sequence[Any]) -> None:
        for piece, data in zip(pieces, into, strict=True):
            number = piece.key[0]
            if number == self.fails_at:
                raise WeightsError(f"page {number} is lost")
            data[:] = number
            with self.has_read:
                self.read_pages.append(number)
                self.has_read.notify()


def spans(count: int) -> list[Span]:
    return [
        Span("f", n * SIZE, (n + 1) * SIZE, [(n * SIZE, Piece(bytes([n]), b"", SIZE, SIZE))], [], 0)
        for n in range(count)
    ]


def ahead(reader: Reader, count: int, window: int = 3 * SIZE) -> Any:
    return read_ahead(reader, spans(count), window)  # type: ignore[arg-type]


def test_spans_come_in_order_with_their_bytes() -> None:
    found = [(filled.span.start, set(filled.data.tolist())) for filled in ahead(Reader(), 20)]
    assert found == [(n * SIZE, {n}) for n in range(20)]


def test_no_more_than_the_window_is_read_ahead() -> None:
    reader = Reader()
    running = ahead(reader, 20)
    next(running)
    running.close()
    assert max(reader.read_pages) <= 3


def test_pages_are_read_while_the_caller_uses_what_came_before() -> None:
    reader = Reader()
    running = ahead(reader, 20)
    next(running), next(running)
    with reader.has_read:
        assert reader.has_read.wait_for(lambda: 4 in reader.read_pages, timeout=10.0)


def test_a_caller_that_keeps_everything_is_not_held_up() -> None:
    kept: list[Filled] = list(ahead(Reader(), 40, window=SIZE))
    assert [int(filled.data[0]) for filled in kept] == list(range(40))


def test_an_error_comes_before_the_bytes_that_it_is_about_and_ends_the_reading() -> None:
    running = ahead(Reader(fails_at=5), 20)
    found = []
    with pytest.raises(WeightsError, match="page 5 is lost"):
        found.extend(int(filled.data[0]) for filled in running)
    assert found == list(range(len(found)))
    assert len(found) <= 5
