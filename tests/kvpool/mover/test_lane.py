"""Calls over a socket pair: answers, time-outs, and ends that are gone or speak nonsense."""

from __future__ import annotations

import threading

import pytest

from pdserve.kvpool.mover.lane import Lane
from pdserve.kvpool.mover.messages import HEADER, MAX_FRAME_BYTES


def frame(body: bytes, number: int = 7) -> bytes:
    return HEADER.pack(len(body), number) + body


@pytest.fixture
def lanes() -> tuple[Lane, Lane]:
    ours, theirs = Lane.pair()
    return ours, Lane(theirs)


@pytest.mark.parametrize("size", [0, 10, 3_000_000])  # the last is longer than any socket's buffer
def test_the_answer_comes_back_whole(lanes: tuple[Lane, Lane], size: int) -> None:
    ours, theirs = lanes

    def echo() -> None:
        theirs.send(frame(bytes(theirs.receive()) + b"!"))

    thread = threading.Thread(target=echo)
    thread.start()
    assert ours.call(frame(b"x" * size), 30.0) == b"x" * size + b"!"
    thread.join()


def test_a_silent_end_is_a_timeout(lanes: tuple[Lane, Lane]) -> None:
    with pytest.raises(TimeoutError):
        lanes[0].call(frame(b"hello"), 0.05)


def test_a_closed_end_is_noticed(lanes: tuple[Lane, Lane]) -> None:
    lanes[1].close()
    with pytest.raises(ConnectionError):
        lanes[0].call(frame(b"hello"), 5.0)


@pytest.mark.parametrize("answer", [HEADER.pack(MAX_FRAME_BYTES + 1, 7), frame(b"one") + frame(b"two")])
def test_what_is_no_answer_is_refused(lanes: tuple[Lane, Lane], answer: bytes) -> None:
    lanes[1].send(answer)
    with pytest.raises(ValueError, match="frame"):
        lanes[0].call(frame(b"hello"), 5.0)


def test_the_answer_to_another_call_is_refused(lanes: tuple[Lane, Lane]) -> None:
    lanes[1].send(frame(b"late", number=6))
    with pytest.raises(ValueError, match="answer to call 6"):
        lanes[0].call(frame(b"hello", number=7), 5.0)
