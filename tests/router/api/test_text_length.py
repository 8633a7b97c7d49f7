"""A text is refused only if it has too many tokens in any case."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.errors import RequestError
from pdserve.router.api.endpoints import ENDPOINTS
from pdserve.router.api.request_body import parse_request
from pdserve.router.api.text_length import check_texts
from pdserve.text_bound import NO_BOUND, TextBound

TOKENS, BOUND = 100, TextBound(10, 4)
FITS, TOO_LONG = "x" * 990, "x" * 991
COMPLETIONS, GENERATE, EMBEDDINGS = "/v1/completions", "/generate", "/v1/embeddings"


def refusal(path: str, body: dict[str, Any] | bytes, bound: TextBound = BOUND) -> RequestError | None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        check_texts(parse_request(data), ENDPOINTS[path], TOKENS, bound)
    except RequestError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("path", "field"), [(COMPLETIONS, "prompt"), (GENERATE, "text"), (EMBEDDINGS, "input")]
)
def test_a_text_that_cannot_fit_is_refused_in_one_line(path: str, field: str) -> None:
    assert refusal(path, {field: FITS}) is None
    error = refusal(path, {field: TOO_LONG})
    assert error is not None
    assert (error.status, error.param, error.code) == (400, field, "context_length_exceeded")
    assert str(error) == (
        f"The text in '{field}' is too long: 991 bytes are at least 100 tokens, and the model takes fewer "
        "than 100. Send a shorter text."
    )


def test_each_prompt_of_a_list_is_counted_by_itself() -> None:
    assert refusal(COMPLETIONS, {"prompt": [FITS] * 50}) is None
    assert refusal(COMPLETIONS, {"prompt": ["short", TOO_LONG, FITS]}) is not None


def test_text_is_counted_as_it_is_decoded() -> None:
    escaped = b'{"prompt":"%b"}' % (rb"\u0041" * 990)
    assert refusal(COMPLETIONS, escaped) is None
    assert refusal(COMPLETIONS, b'{"prompt":"%b"}' % (rb"\u0041" * 991)) is not None


def test_what_a_normalizer_may_shorten_counts_less() -> None:
    """Characters of three bytes: three quarters of a byte each, at least."""
    assert refusal(COMPLETIONS, {"prompt": "한" * 1320}) is None
    assert refusal(COMPLETIONS, {"prompt": "한" * 1322}) is not None
    assert refusal(COMPLETIONS, {"prompt": "한" * 331}, TextBound(10)) is not None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TOO_LONG}]}),
        ("/tokenize", {"prompt": TOO_LONG}),
        (COMPLETIONS, {"prompt": [1] * 2000}),
        (COMPLETIONS, {"prompt": [[1] * 2000]}),
        (GENERATE, {"text": TOO_LONG, "input_ids": [1]}),
        (GENERATE, {"text": TOO_LONG, "input_embeds": [[0.5]]}),
        (GENERATE, {"text": TOO_LONG, "image_data": "data:image/png;base64,AA"}),
        (GENERATE, {"prompt": TOO_LONG, "text": "a"}),
        (EMBEDDINGS, {"input": [{"text": TOO_LONG}]}),
    ],
)
def test_what_a_worker_may_take_or_has_to_judge_is_passed_on(path: str, body: Any) -> None:
    assert refusal(path, body) is None


def test_without_a_bound_nothing_is_refused() -> None:
    assert refusal(COMPLETIONS, {"prompt": TOO_LONG * 100}, NO_BOUND) is None
