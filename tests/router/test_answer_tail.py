from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.answer_tail import AnswerTail, CachedDetails, read_tail

from .mock_worker import ANSWER, STREAM


def test_usage_is_read_off_the_end_of_an_answer() -> None:
    assert read_tail(ANSWER) == AnswerTail(completion_tokens=2)
    assert read_tail(STREAM) == AnswerTail()


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_the_last_word_counts(separators: tuple[str, str]) -> None:
    events = b""
    for tokens in (1, 2, 3):
        details = {"device": tokens, "host": 5, "storage": 7, "storage_backend": "Pool"}
        meta = {"completion_tokens": tokens, "cached_tokens_details": details}
        events += b"data: " + json.dumps({"meta_info": meta}, separators=separators).encode() + b"\n\n"
    assert read_tail(events) == AnswerTail(3, CachedDetails(3, 5, 7))


@given(st.text())
def test_an_answers_text_cannot_pretend(text: str) -> None:
    forged = f'"completion_tokens":9 "cached_tokens_details":{{"device":9}} {text}'
    assert read_tail(json.dumps({"text": forged}).encode()) == AnswerTail()


@given(st.binary())
def test_any_bytes_can_be_the_end_of_an_answer(tail: bytes) -> None:
    read_tail(tail)
    read_tail(tail + b'"cached_tokens_details":{"device":"x"}')
