"""Tokens counted off an answer."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.api.endpoints import ENDPOINTS
from pdserve.router.request.token_usage import Meter
from tests.support.router.mock_worker import DONE

USAGE = b'"usage":{"prompt_tokens":30,"total_tokens":42,"completion_tokens":12,"prompt_tokens_details":null}'


def test_who_asks_twice_is_told_the_same() -> None:
    meter = Meter(5, choices=2)
    for choice in (0, 1):
        meter.count(b'data: {"choices":[{"index":%d}],%b}\n\n' % (choice, USAGE))
    assert meter.total(streamed=True) == meter.total(streamed=True) == (30, 24)


def test_a_stream_that_does_not_is_counted_by_its_events() -> None:
    meter = Meter(5)
    meter.prompt_tokens = 7
    meter.count(b"data: {}\n\ndata: {}\n\n")
    meter.count(b"data: {}\n\n")
    assert meter.total(streamed=True) == (7, 3)


@given(st.sets(st.integers(1, 2)))
def test_events_count_the_same_however_many_come_at_a_time(cuts: set[int]) -> None:
    events = [b'data: {"text":"data: "}\n\n', b"data: {}\r\n\r\n", b"data: [DONE]\n\n"]
    meter = Meter(5)
    for begin, end in itertools.pairwise([0, *sorted(cuts), 3]):
        meter.count(b"".join(events[begin:end]))
    assert meter.events == 3


def test_no_text_of_an_answer_passes_for_its_usage() -> None:
    meter = Meter(0)
    meter.count(b'{"choices":[{"text":"{\\"prompt_tokens\\":1,\\"completion_tokens\\":1}"}],' + USAGE + b"}")
    assert meter.total(streamed=False) == (30, 12)


def of_choice(choice: int, tokens: int, prompt_tokens: int = 9) -> bytes:
    """An event of a stream of SGLang's own, as it is where there are several choices."""
    meta = b'"meta_info":{"id":"c","finish_reason":null,"prompt_tokens":%d,"completion_tokens":%d},"index":%d'
    return b'data: {"text":"",%b}\n\n' % (meta % (prompt_tokens, tokens, choice))


@pytest.mark.parametrize("is_whole", [True, False])
def test_every_prompt_of_a_streamed_batch_is_charged_with_what_was_delivered(is_whole: bool) -> None:
    meter = Meter(10)
    for tokens in range(1, 10):
        for choice in range(100):
            meter.count(of_choice(choice, tokens, prompt_tokens=1000))
    if is_whole:
        meter.count(DONE)
    assert meter.total(streamed=True) == (100_000, 900)


@pytest.mark.parametrize("reported", [None, 5000])
def test_leaving_a_batch_early_does_not_make_its_prompts_cheap(reported: int | None) -> None:
    meter = Meter(4000, prompts=100)
    meter.prompt_tokens = reported
    meter.count(of_choice(0, 1))
    assert meter.total(streamed=True) == (reported or 4000, 1)


def test_a_prompt_counts_once_however_many_answers_say_it() -> None:
    one = b'{"text":"","meta_info":{"prompt_tokens":%d,"completion_tokens":1}}'
    meter = Meter(0, choices=2)
    meter.count_whole(b"[" + b",".join([one % 9, one % 9, one % 5]))  # a long answer, in two pieces
    meter.count_whole(b"," + one % 5 + b"]")
    assert meter.total(streamed=False) == (14, 4)
    meter = Meter(4000, choices=2, prompts=2)
    for choice in range(4):
        meter.count(of_choice(choice, 1, prompt_tokens=[9, 5][choice // 2]))
    assert meter.total(streamed=True) == (14, 4), "of an answer that was broken off all prompts are known"


@pytest.mark.parametrize(("count", "tokens"), [(b"12", 12), (b"[3, 4,5]", 12), (b"[]", 7), (b"0", 7)])
def test_tokenizing_says_how_many_tokens_it_found(count: bytes, tokens: int) -> None:
    meter = Meter(7, ENDPOINTS["/tokenize"].usage)
    meter.count_whole(b'{"tokens":[1,2,3],"count":' + count + b',"max_model_len":64}')
    assert meter.total(streamed=False) == (tokens, 0)


def test_a_long_list_of_counts_that_comes_in_pieces_is_not_cheaper_than_its_estimate() -> None:
    meter = Meter(5000, ENDPOINTS["/tokenize"].usage)
    for piece in (b'{"tokens":[[1,2],[3]', b'],"count":[2,', b'1],"max_model_len":64}'):
        meter.count_whole(piece)
    assert meter.total(streamed=False) == (5000, 0)


@given(
    st.lists(st.binary() | st.just(b'"completion_tokens":') | st.just(b'data: {"index":1,')), st.booleans()
)
def test_any_bytes_can_be_an_answer(pieces: list[bytes], streamed: bool) -> None:
    meter = Meter(1)
    for piece in pieces:
        (meter.count if streamed else meter.count_whole)(piece)
    prompt, output = meter.total(streamed)
    assert prompt >= 0
    assert output >= 0
