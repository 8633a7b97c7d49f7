"""Which requests need a worker that computes their prompt."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.router.api.request_body import asks_about_prompt

PLAIN = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"echo": False, "logprobs": True, "top_logprobs": 5},
        {"return_logprob": True, "logprob_start_len": -1},
        {"session_id": None, "return_hidden_states": False, "image_data": None},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": '"image_url": "a"'}]}]},
        {"tools": [{"function": {"parameters": {"image_url": {}}}}]},
    ],
)
def test_ordinary_requests_do_not(more: dict[str, Any]) -> None:
    assert not asks_about_prompt(json.dumps(PLAIN | more).encode())


@pytest.mark.parametrize(
    "more",
    [
        {"echo": True},
        {"logprob_start_len": 0},
        {"logprob_start_len": [-1]},
        {"return_hidden_states": "last"},
        {"session_params": {"id": "x"}},
        {"input_embeds": [[0.5]]},
        {"image_data": "x.png"},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": ""}}]}]},
    ],
)
def test_those_about_the_prompt_and_with_media_do(more: dict[str, Any]) -> None:
    assert asks_about_prompt(json.dumps(PLAIN | more).encode())


def test_what_cannot_be_read_is_left_to_a_worker_that_computes_prompts() -> None:
    assert asks_about_prompt(b"[" * 5000)
