from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.api.errors import convert_error

TOO_LONG = "The input (5000 tokens) is longer than the model's context length (4096 tokens)."
TOO_MANY = (
    "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a "
    "total of 5000 tokens: 4000 tokens from the input messages and 1000 tokens for the completion."
)


@pytest.mark.parametrize(
    ("status", "body", "message", "type_", "code"),
    [
        (
            400,
            {"object": "error", "message": TOO_LONG, "type": "BadRequest", "param": None, "code": 400},
            TOO_LONG,
            "invalid_request_error",
            "context_length_exceeded",
        ),
        (
            400,
            {"object": "error", "message": TOO_MANY, "type": "BadRequest", "param": None, "code": 400},
            TOO_MANY,
            "invalid_request_error",
            "context_length_exceeded",
        ),
        (404, {"detail": "Not Found"}, "Not Found", "invalid_request_error", None),
        (
            422,
            {"detail": [{"loc": ["body", "messages", 0], "msg": "Field required", "type": "missing"}]},
            "messages.0: Field required",
            "invalid_request_error",
            None,
        ),
        (400, {"error": {"message": "no", "code": "bad"}}, "no", "invalid_request_error", "bad"),
        (500, {"error": "boom"}, "boom", "server_error", None),
        (429, {"message": "full"}, "full", "rate_limit_error", None),
        (500, [], "The worker answered with status 500 and no message.", "server_error", None),
    ],
)
def test_sglangs_errors_become_openais(
    status: int, body: object, message: str, type_: str, code: str | None
) -> None:
    error = json.loads(convert_error(status, json.dumps(body).encode()))["error"]
    assert error == {"message": message, "type": type_, "param": None, "code": code}


@given(st.integers(400, 599), st.binary() | st.recursive(st.none() | st.text(), st.lists).map(json.dumps))
def test_any_answer_becomes_an_error_of_the_right_form(status: int, body: bytes | str) -> None:
    converted = convert_error(status, body if isinstance(body, bytes) else body.encode())
    error = json.loads(converted)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
