"""Tokens counted off an answer."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.usage import Meter

USAGE = b'"usage":{"prompt_tokens":30,"total_tokens":42,"completion_tokens":12,"prompt_tokens_details":null}'


def test_an_answer_in_one_piece_says_its_usage() -> None:
    meter = Meter(5)
    meter.count(b'{"id":"1","choices":[{"text":"data: "}],' + USAGE + b"}")
    assert meter.total(streamed=False) == (30, 12)


def test_a_stream_that_says_its_usage_is_believed() -> None:
    meter = Meter(5)
    meter.count(b'data: {"choices":[],"usage":null}\n\n')
    meter.count(b"data: {" + USAGE + b"}\n\ndata: [DONE]\n\n")
    assert meter.total(streamed=True) == (30, 12)


def test_a_stream_that_does_not_is_counted_by_its_events() -> None:
    meter = Meter(5)
    meter.prompt_tokens = 7
    meter.count(b"data: {}\n\ndata: {}\n\n")
    meter.count(b"data: {}\n\n")
    assert meter.total(streamed=True) == (7, 3)


def test_an_answer_that_speaks_of_data_is_not_charged_for_that() -> None:
    meter = Meter(5)
    meter.count(b'data: {"text":"data: data: \\ndata: "}\n\ndata: [DONE]\n\n')
    assert meter.events == 2


@given(st.lists(st.integers(0, 60)))
def test_events_count_the_same_wherever_the_answer_is_cut(cuts: list[int]) -> None:
    answer = b'data: {"text":"data: "}\n\ndata: {}\r\n\r\ndata: [DONE]\n\n'
    meter = Meter(5)
    for begin, end in itertools.pairwise([0, *sorted(cuts), len(answer)]):
        meter.count(answer[begin:end])
    assert meter.events == 3


def test_sglangs_own_answers_are_understood() -> None:
    one = b'{"text":"","meta_info":{"id":"a","prompt_tokens":9,"completion_tokens":%d,"cached_tokens":0}}'
    meter = Meter(0)
    meter.count(b"[" + one % 4 + b"," + one % 5 + b"]")
    assert meter.total(streamed=False) == (18, 9)
    meter = Meter(0)
    for tokens in (1, 2, 3):
        meter.count(b"data: " + one % tokens + b"\n\n")
    assert meter.total(streamed=True) == (9, 3)


def test_no_text_of_an_answer_passes_for_its_usage() -> None:
    meter = Meter(0)
    meter.count(b'{"choices":[{"text":"{\\"prompt_tokens\\":1,\\"completion_tokens\\":1}"}],' + USAGE + b"}")
    assert meter.total(streamed=False) == (30, 12)


def test_nothing_answered_is_no_output() -> None:
    assert Meter(100).total(streamed=False) == (100, 0)


def test_every_choice_of_a_stream_of_sglangs_own_counts_once_and_whole() -> None:
    """The choices' events come mixed; each has its own growing count, and an end of its own."""
    meter = Meter(0)

    def step(choice: int, tokens: int, end: str = "null") -> None:
        meta = b'"meta_info":{"id":"c%d","finish_reason":%b,"prompt_tokens":9,"completion_tokens":%d}'
        meter.count(b'data: {"text":"",%b}\n\n' % (meta % (choice, end.encode(), tokens)))

    ends = '{"type":"length","length":4}', '{"type":"stop","matched":"}"}'
    for _ in range(2):
        step(0, 1)
        step(1, 2)
    step(0, 4, ends[0])
    step(1, 5)
    step(1, 7, ends[1])
    assert meter.total(streamed=True) == (9, 11)


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_numbers_are_read_with_and_without_blanks(separators: tuple[str, str]) -> None:
    meter = Meter(0)
    usage = {"usage": {"prompt_tokens": 3, "completion_tokens": 4}}
    meter.count(json.dumps(usage, separators=separators).encode())
    assert meter.total(streamed=False) == (3, 4)


@given(
    st.lists(st.binary() | st.just(b'"completion_tokens":') | st.just(b'"finish_reason":{')), st.booleans()
)
def test_any_bytes_can_be_an_answer(pieces: list[bytes], streamed: bool) -> None:
    meter = Meter(1)
    for piece in pieces:
        meter.count(piece)
    prompt, output = meter.total(streamed)
    assert prompt >= 0
    assert output >= 0
