"""Answers whose first token a prefill worker has sampled, from real SGLang: as those that a worker computes
alone, in whatever form they are asked for. Another token in its place shows that it is taken.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.e2e.cluster import Worker, http
from tests.support.e2e.prompts import NEW_TOKENS, PAGE, token_ids
from tests.support.e2e.routed import found
from tests.support.e2e.site import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

TIMEOUT_S = 120.0
FIRST = "x-pdserve-first"
EVENT = "data: {"


def event_of(line: str) -> dict[str, Any]:
    return dict(json.loads(line.removeprefix("data: ")))


def asked(prompt: list[int], **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True, **more}
    return {"input_ids": prompt, "sampling_params": sampling}


def first_of(prefill: Worker, body: dict[str, Any]) -> str:
    """Have the prompt computed and published; the token behind it, as the report says it."""
    url = f"{prefill.url}/pd/prefill?endpoint=/generate"
    report = http.post(url, json=body, timeout=TIMEOUT_S).json()
    assert report["missing_pages"] == 0
    return str(report["first"])


def answered(worker: Worker, body: dict[str, Any], first: str = "") -> dict[str, Any]:
    headers = {FIRST: first} if first else {}
    answer = http.post(f"{worker.url}/generate", json=body, headers=headers, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    return {**answer.json(), "found": found(answer)}


def streamed(worker: Worker, body: dict[str, Any], first: str) -> list[dict[str, Any]]:
    url = f"{worker.url}/generate"
    with http.stream(
        "POST", url, json={**body, "stream": True}, headers={FIRST: first}, timeout=TIMEOUT_S
    ) as answer:
        return [event_of(line) for line in answer.iter_lines() if line.startswith(EVENT)]


def said(body: dict[str, Any]) -> tuple[Any, ...]:
    meta = body["meta_info"]
    return body["text"], body["output_ids"], meta["completion_tokens"], meta["finish_reason"]["type"]


@pytest.mark.parametrize("length", [PAGE, 3 * PAGE, 3 * PAGE + 1, 200])
def test_an_answer_that_begins_with_a_prefill_workers_token_is_the_one_that_a_worker_computes(
    cluster: Cluster, length: int
) -> None:
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    body = asked(token_ids(8100 + length, length))
    first = first_of(prefill, body)
    whole = answered(decode, body, first)
    assert whole["meta_info"]["prompt_tokens"] == length
    assert whole["found"]["pool"] == length // PAGE * PAGE, "no page is computed where the prompt fills it"
    decode.flush()
    events = streamed(decode, body, first)
    assert events[0]["output_ids"] == whole["output_ids"][:1], "it leaves before the next one is computed"
    assert said(events[-1]) == said(whole) == said(answered(cluster.decode[1], body))


def test_the_token_is_what_the_answer_goes_on_from(cluster: Cluster) -> None:
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    body = asked(prompt := token_ids(8200, 150))
    digest = first_of(prefill, body).partition("x")[2]
    whole = answered(decode, body, f"77x{digest}")
    after = answered(cluster.decode[1], asked([*prompt, 77], max_new_tokens=NEW_TOKENS - 1))
    assert whole["output_ids"] == [77, *after["output_ids"]]
    assert whole["meta_info"]["completion_tokens"] == NEW_TOKENS
    other = f"77x{'0' * len(digest)}"
    assert answered(decode, body, other)["output_ids"] == answered(cluster.decode[1], body)["output_ids"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_token_that_ends_the_answer_is_all_of_it(cluster: Cluster, stream: bool) -> None:
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    body = asked(token_ids(8300 + stream, 100), ignore_eos=False, stop_token_ids=[77])
    digest = first_of(prefill, body).partition("x")[2]
    ended = streamed(decode, body, f"77x{digest}")[-1] if stream else answered(decode, body, f"77x{digest}")
    assert ended["output_ids"] == [77]
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": 77}


def test_through_a_router_a_sampled_stream_has_all_of_its_tokens(cluster: Cluster) -> None:
    prompt = token_ids(8400, 3 * PAGE)
    body = {"model": "demo-tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0.8, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    url, usage, texts = f"{cluster.pairs[0].url}/v1/completions", None, []
    with http.stream("POST", url, json=body, timeout=TIMEOUT_S) as answer:
        assert "stage=ok" in answer.headers["x-pdserve-plan"]
        for line in answer.iter_lines():
            if line.startswith(EVENT):
                event = event_of(line)
                usage = event["usage"] or usage
                texts += [choice["text"] for choice in event["choices"]]
    assert usage is not None
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3 * PAGE, 8)
    assert "".join(texts)
