"""Errors in the form of OpenAI, and ids that name the worker and the tenant of what they stand for."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.api.endpoints import find_holder, new_id
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


# --- Ids that name the worker and the tenant of what they stand for


WORKERS = tuple(f"10.0.0.{i}:8000" for i in range(50))


def test_an_id_leads_to_its_worker_at_every_router() -> None:
    for worker in WORKERS:
        assert find_holder(new_id(worker, "acme"), WORKERS, "acme") == worker


def test_nobody_finds_what_another_tenant_holds_or_what_left_with_its_worker() -> None:
    id_ = new_id(WORKERS[3], "acme")
    assert find_holder(id_, WORKERS, "beta") is None
    assert find_holder(id_, WORKERS[4:], "acme") is None


def test_two_ids_of_one_worker_differ_and_none_is_the_beginning_of_another() -> None:
    """SGLang ends every request whose id begins with the one that it is told."""
    ids = [new_id(WORKERS[0], "acme") for _ in range(100)]
    assert len(set(ids)) == 100
    assert {len(one) for one in ids} == {len(ids[0])}


@given(st.text())
def test_any_text_may_be_asked_for(text: str) -> None:
    for given_id in (text, "resp_" + text):
        assert find_holder(given_id, WORKERS, "acme") is None
