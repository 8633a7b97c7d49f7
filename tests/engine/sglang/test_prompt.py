"""What a worker makes of a client's body for its prefill."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pdserve.engine.contract.endpoints import GENERATE
from pdserve.engine.sglang.children.scheduler import POOL_ROOM
from pdserve.engine.sglang.prompt import FOR_THE_POOL, prefill_request
from pdserve.errors import RequestError


def prefill_of(body: Any) -> Any:
    return asyncio.run(prefill_request(None, GENERATE, json.dumps(body).encode(), None))


def test_what_sglangs_own_route_ignores_is_ignored() -> None:
    """The router reads `model` to choose among several; anything else unknown is the client's affair."""
    asked = prefill_of({"text": "a", "model": "m", "what_a_client_adds": {"x": 1}})
    assert asked.text == "a"
    assert asked.sampling_params == {"max_new_tokens": 1, "n": 1}


def test_a_prefill_samples_one_token_as_its_client_asks_and_streams_nothing() -> None:
    asked = prefill_of(
        {
            "input_ids": [[1, 2], [3]],
            "rid": "1",
            "stream": True,
            "return_logprob": True,
            "sampling_params": {"max_new_tokens": 9, "n": 3, "stop": ["x"], "top_p": 0.5, "temperature": 0.7},
        }
    )
    assert asked.input_ids == [[1, 2], [3]]
    assert (asked.rid, asked.stream, asked.return_logprob) == (None, False, False)
    assert asked.sampling_params == {"top_p": 0.5, "temperature": 0.7, "max_new_tokens": 1, "n": 1}


@pytest.mark.parametrize(
    "body",
    [
        {"text": "a", "sampling_params": "x"},
        {"text": "a", "sampling_params": {"temperature": "x"}},
        {"text": 5},
        {"text": "a", "stream": "yes"},
        {"input_ids": [1, "b"]},
        ["a"],
        "a",
    ],
    ids=json.dumps,
)
def test_what_sglangs_own_route_refuses_is_the_clients_fault(body: Any) -> None:
    with pytest.raises(RequestError) as refused:
        prefill_of(body)
    assert refused.value.status == 400
    assert str(refused.value).count("\n") == 0


def test_a_body_that_is_no_json_is_the_clients_fault() -> None:
    with pytest.raises(RequestError, match="not a /generate request"):
        asyncio.run(prefill_request(None, GENERATE, b'{"text":', None))


def test_the_first_token_of_a_direct_hand_off_is_sampled_as_the_client_asks() -> None:
    sampling = {"max_new_tokens": 9, "temperature": 0.7, "regex": "a+", "stop_token_ids": [3]}
    body = {"input_ids": [1], "stream": True, "return_logprob": True, "sampling_params": sampling}
    asked = asyncio.run(prefill_request(None, GENERATE, json.dumps(body).encode(), None, is_direct=True))
    assert asked.sampling_params == sampling
    assert (asked.stream, asked.return_logprob) == (False, True)


def test_a_prefill_for_the_pool_is_in_a_room_where_nobody_waits() -> None:
    assert FOR_THE_POOL == ("2.2.2.2", None, POOL_ROOM)
