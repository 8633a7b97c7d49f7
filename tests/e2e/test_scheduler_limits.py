"""No request ends a worker, or holds it up: each of these ended or held up SGLang's scheduler (0.5.23)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.e2e.cluster import Worker, http

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
IDS = [300, 301, 302, 303]
CHAT = {"model": "demo-tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
LOGPROB = {"return_logprob": True}


def native(sampling: dict[str, Any], **more: Any) -> tuple[str, dict[str, Any]]:
    usual = {"max_new_tokens": 4, "ignore_eos": True}
    return "/generate", {"input_ids": IDS, "sampling_params": usual | sampling, **more}


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (native({"top_k": 2**30}), 200),
        (native({"top_k": 2**31}), 400),
        (native({"stop_token_ids": [10**9], "min_new_tokens": 1}), 200),
        (("/v1/chat/completions", {**CHAT, "stop_token_ids": [-5], "min_tokens": 1}), 200),
        (native({"min_new_tokens": 2**40, "max_new_tokens": None}), 400),
        (("/v1/chat/completions", {**CHAT, "lora_path": ["", "x"]}), 400),
        (native({}, lora_path=["x"]), 400),
        (native({"regex": "a", "min_new_tokens": 20, "max_new_tokens": 24}), 400),
        (native({"temperature": 1.0, "top_p": 0.9, "regex": "a", "ignore_eos": True}), 200),
        (native({}, **LOGPROB, top_logprobs_num=10**6), 400),
        (("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 10**6}), 400),
        (native({}, session_params={"id": {"error": "no"}}), 400),
        (native({}, input_ids=[-1, 5]), 400),
        (native({}, input_ids=[[5], [5, 10**6]]), 400),
        (("/v1/completions", {"model": "demo-tiny", "prompt": [5, 10**6], "max_tokens": 2}), 400),
        (native({"stop_regex": "(a|a)*b"}), 400),
    ],
    ids=str,
)
def test_a_worker_outlives_its_request(
    plain_worker: Worker, request_: tuple[str, dict[str, Any]], status: int
) -> None:
    path, body = request_
    answer = http.post(f"{plain_worker.url}{path}", json=body, timeout=60.0)
    assert answer.status_code == status, answer.text
    assert len(plain_worker.generate(IDS, 2)["output_ids"]) == 2


def test_a_worker_outlives_the_marks_of_a_worker_that_lies(plain_worker: Worker) -> None:
    _, body = native({}, stream=True)
    so_far = {"characters": 0, "token_ids": [10**6]}
    text = f"{json.dumps(so_far)}\n{json.dumps(body)}"
    answer = http.post(f"{plain_worker.url}/pd/continue?endpoint=/generate", content=text, timeout=60.0)
    assert answer.status_code == 400
    assert len(plain_worker.generate(IDS, 2)["output_ids"]) == 2
