"""Tokens counted off an answer."""

from __future__ import annotations

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
