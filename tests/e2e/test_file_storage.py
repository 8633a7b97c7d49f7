"""A worker without the pool, on SGLang's own file backend, in the layer_first layout: pages come back with
the right answer, and clients' features work straight from a worker.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.support.e2e.cluster import Worker, http
from tests.support.e2e.prompts import PAGE, Answer, differences

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [
        [rng.randrange(300, 4000) for _ in range(length)] for length in (1, 63, 64, 65, 128, 129, 1000, 3000)
    ]


def test_pages_from_storage_give_the_same_answer(file_worker: Worker) -> None:
    cold = [Answer.of(file_worker.generate(prompt, 24)) for prompt in prompts()]
    file_worker.flush()
    again = [file_worker.generate(prompt, 24) for prompt in prompts()]
    assert differences(cold, [Answer.of(body) for body in again], str) == []
    # the last token is always computed, so a prompt of whole pages computes its last page
    details = [body["meta_info"].get("cached_tokens_details") or {} for body in again]
    assert [found.get("storage", 0) for found in details] == [
        (len(prompt) - 1) // PAGE * PAGE for prompt in prompts()
    ]


def test_answers_vary_and_depend_on_early_tokens(file_worker: Worker) -> None:
    prompt = prompts()[-2]
    answer = Answer.of(file_worker.generate(prompt, 24))
    changed = Answer.of(file_worker.generate([prompt[0], prompt[1] + 1, *prompt[2:]], 24))
    assert len(set(answer.tokens)) > len(answer.tokens) // 2
    assert changed.tokens != answer.tokens


def test_the_worker_says_who_it_is(file_worker: Worker) -> None:
    info = http.get(f"{file_worker.url}/pd/info").json()
    assert (info["role"], info["model"]) == ("agg", "demo-tiny")
    ready = http.get(f"{file_worker.url}/pd/ready").json()
    assert (ready["ready"], ready["pool"]) == (True, "down")


def test_chat_with_tools_schema_and_logprobs(file_worker: Worker) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "pick",
            "strict": True,  # else SGLang takes any JSON for the arguments
            "parameters": {
                "type": "object",
                "properties": {"colour": {"enum": ["red", "blue"]}},
                "required": ["colour"],
                "additionalProperties": False,
            },
        },
    }
    ask: dict[str, Any] = {
        "model": "demo-tiny",
        "messages": [{"role": "user", "content": "Pick one."}],
        "temperature": 0,
    }

    def choice(**more: Any) -> dict[str, Any]:
        answer = http.post(f"{file_worker.url}/v1/chat/completions", json={**ask, **more}, timeout=120.0)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] <= more["max_tokens"]
        return dict(answer.json()["choices"][0])

    named = {"type": "function", "function": {"name": "pick"}}
    called = choice(tools=[tool], tool_choice=named, max_tokens=64)
    function = called["message"]["tool_calls"][0]["function"]
    assert function["name"] == "pick"
    assert json.loads(function["arguments"])["colour"] in ("red", "blue")

    schema = {"name": "choice", "schema": tool["function"]["parameters"]}  # type: ignore[index]
    fixed = choice(response_format={"type": "json_schema", "json_schema": schema}, max_tokens=64)
    assert json.loads(fixed["message"]["content"])["colour"] in ("red", "blue")

    shown = choice(logprobs=True, top_logprobs=2, max_tokens=4)
    assert [len(entry["top_logprobs"]) for entry in shown["logprobs"]["content"]] == [2] * 4
