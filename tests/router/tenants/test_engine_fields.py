"""Fields that control the engine: refused from tenants, whatever their spelling."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest

from pdserve.errors import RequestError
from pdserve.router.api.request_body import parse_request
from pdserve.router.tenants.rights import ENGINE_FIELDS, check_fields, parse_tenant_request

REQUEST: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}


def checked(body: bytes) -> None:
    check_fields(parse_tenant_request(body))


@pytest.mark.parametrize("field", ENGINE_FIELDS)
@pytest.mark.parametrize("value", [0, 1, "", "x", [], {"a": 1}, False])
def test_each_is_refused_whatever_its_value(field: str, value: object) -> None:
    with pytest.raises(RequestError) as error:
        checked(json.dumps({**REQUEST, field: value}).encode())
    assert error.value.status == 400
    assert f"'{field}'" in str(error.value)


def test_a_name_written_with_escapes_is_the_same_name() -> None:
    with pytest.raises(RequestError, match="'rid'"):
        checked(b'{"r\\u0069d": "x"}')


def test_of_a_name_that_comes_twice_the_last_counts_as_for_the_engine() -> None:
    with pytest.raises(RequestError):
        checked(b'{"rid": null, "rid": "x"}')


@pytest.mark.parametrize(
    "body",
    [
        REQUEST,
        {**REQUEST, "session_id": None, "rid": None},
        {**REQUEST, "messages": [{"role": "user", "content": '{"priority": 5, "rid": "x"}'}]},
        {
            **REQUEST,
            "tools": [{"function": {"parameters": {"properties": {"priority": {"type": "integer"}}}}}],
        },
        {**REQUEST, "temperature": 0.5, "user": "u", "seed": 1, "top_logprobs": 2, "regex": "a*"},
    ],
)
def test_what_shapes_ones_own_answer_passes(body: dict[str, Any]) -> None:
    encoded = json.dumps(body).encode()
    checked(encoded)
    view, plain = parse_tenant_request(encoded), parse_request(encoded)
    assert (view.model, view.stream, bytes(view.messages)) == (
        plain.model,
        plain.stream,
        bytes(plain.messages),
    )


def test_the_table_names_fields_that_this_sglang_has() -> None:
    """A name that SGLang gave up, or spells otherwise now, would protect nothing."""
    from sglang.srt.entrypoints.openai import protocol
    from sglang.srt.managers.io_struct import GenerateReqInput

    from pdserve.decode.lookup import Asked

    known = set(inspect.signature(GenerateReqInput).parameters) | {"kv_hints"}
    names = ("ChatCompletionRequest", "CompletionRequest", "EmbeddingRequest", "ScoringRequest")
    for request in (getattr(protocol, name) for name in names):
        known |= set(request.model_fields)
    known |= set(Asked.__struct_fields__)  # of our own look-up
    assert set(ENGINE_FIELDS) <= known
