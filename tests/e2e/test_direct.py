"""Prefill → decode by SGLang's own transfer, with the pool for reuse and for the failure of either worker."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from pdserve.pages import page_hashes
from tests.support.e2e import routed
from tests.support.e2e.cluster import Worker, eventually, http, metric
from tests.support.e2e.prompts import NEW_TOKENS, PAGE, Answer, differences, token_ids
from tests.support.e2e.routed import generate, say, wanted_hits
from tests.support.e2e.site import Direct, Reference

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(600)]
DIRECT = "handoff=direct(configured)"
STREAMS = 64


def ask(direct: Direct, prompts: list[list[int]], plan: str = DIRECT) -> list[Answer]:
    """Answers through the router, each by a plan that begins so."""
    answers = []
    for prompt in prompts:
        response = generate(direct.router, prompt)
        assert response.status_code == 200, response.text
        assert response.headers["x-pdserve-plan"].split(", ")[0] == plan
        answers.append(Answer.of(response.json()))
    return answers


def outcomes(direct: Direct) -> dict[str, int]:
    """How direct hand-offs have ended so far."""
    begin = 'pdserve_router_direct_total{outcome="'
    lines = [line for line in http.get(f"{direct.router.url}/metrics").text.splitlines() if begin in line]
    return {name: int(float(count)) for name, count in (line[len(begin) :].split('"} ') for line in lines)}


def pages_read(worker: Worker) -> int:
    """From the pool, so far."""
    return int(metric(worker.url, "pdserve_pool_client_pages_total", result="read"))


@contextlib.contextmanager
def streaming(direct: Direct, prompt: list[int], tokens: int) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of a greedy stream."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    with httpx.stream("POST", f"{direct.router.url}/generate", json=body, timeout=120.0) as response:
        assert response.headers["x-pdserve-plan"].startswith(DIRECT)
        lines = response.iter_lines()
        yield (json.loads(line[6:]) for line in lines if line.startswith("data: {"))


@pytest.mark.model_support("multi-head attention", "direct hand-off")
def test_answers_of_the_direct_way_equal_plain_sglang(direct: Direct, reference: Reference) -> None:
    answers = ask(direct, reference.prompts)
    assert differences(reference.first, answers, say(reference.prompts)) == []
    assert differences(reference.second, ask(direct, reference.second_prompts), str) == []
    assert set(outcomes(direct)) == {"ok"}


def test_after_flushing_the_workers_prompts_come_from_the_pool(direct: Direct, reference: Reference) -> None:
    """Both read them there: the sender says what it found, and what the receiver has is not sent to it."""
    ask(direct, reference.second_prompts)
    direct.flush()
    before = pages_read(direct.receiver)
    answers, cached = routed.ask(direct.router, reference.second_prompts)
    assert differences(reference.second, answers, say(reference.second_prompts)) == []
    wanted = [wanted_hits(prompt) for prompt in reference.second_prompts]
    assert cached == wanted
    named = zip(reference.second_prompts, wanted, strict=True)
    pages = {page for prompt, tokens in named for page in page_hashes(prompt[:tokens], PAGE)}
    assert pages_read(direct.receiver) - before == len(pages)


def test_64_streams_at_once(direct: Direct, reference: Reference) -> None:
    """Each prompt by several of them: they share pages, and no tokens."""
    direct.flush()
    of_prompt = dict(zip(map(tuple, reference.prompts), reference.first, strict=True))
    prompts = sorted(reference.prompts, key=len)[: STREAMS // 4] * 4

    def stream(prompt: list[int]) -> list[int]:
        with streaming(direct, prompt, NEW_TOKENS) as events:
            *_, last = events
        return list(last["output_ids"])

    before = outcomes(direct)
    with ThreadPoolExecutor(STREAMS) as threads:
        answers = list(threads.map(stream, prompts))
    assert answers == [list(of_prompt[tuple(prompt)].tokens) for prompt in prompts]
    assert outcomes(direct) == before | {"ok": before.get("ok", 0) + STREAMS}


def test_the_first_token_is_sampled_as_the_client_asks(direct: Direct) -> None:
    """The sender samples it: under a grammar, with log-probabilities, with the client's own end."""
    prompt = token_ids(31, 300)
    asked = {"input_ids": prompt, "return_logprob": True, "top_logprobs_num": 2}
    for sampling in (
        {"temperature": 0, "max_new_tokens": 8, "regex": "[0-9]{5}x"},
        {"temperature": 0, "max_new_tokens": 1},
        {"temperature": 0, "max_new_tokens": 8, "logit_bias": {"77": 90.0}, "stop_token_ids": [77]},
    ):
        body = asked | {"sampling_params": sampling}
        one, other = (
            http.post(f"{url}/generate", json=body).json() for url in (direct.router.url, direct.other.url)
        )
        assert one["output_ids"] == other["output_ids"]
        assert one["meta_info"]["finish_reason"] == other["meta_info"]["finish_reason"]
        tops = [answer["meta_info"]["output_top_logprobs"] for answer in (one, other)]
        assert [[pair[1] for pair in token] for token in tops[0]] == [
            [pair[1] for pair in token] for token in tops[1]
        ]
    assert set(outcomes(direct)) == {"ok"}


@pytest.mark.parametrize(
    ("path", "answer"), [("/v1/chat/completions", "choices"), ("/v1/messages", "content")]
)
def test_chats(direct: Direct, path: str, answer: str) -> None:
    chat: dict[str, Any] = {"model": "demo-tiny", "messages": [{"role": "user", "content": "hello " * 60}]}
    chat |= {"max_tokens": 12, "temperature": 0}
    one, other = (http.post(f"{url}{path}", json=chat) for url in (direct.router.url, direct.other.url))
    assert one.headers["x-pdserve-plan"].startswith(DIRECT)
    assert one.json()[answer] == other.json()[answer]


def test_what_is_asked_about_prompts_goes_through_the_pool(direct: Direct) -> None:
    body = {"input_ids": token_ids(32, 200), "return_logprob": True, "logprob_start_len": 0}
    told = http.post(f"{direct.router.url}/generate", json=body | {"sampling_params": {"max_new_tokens": 1}})
    assert told.headers["x-pdserve-plan"].startswith("handoff=pool(only), ")
    assert len(told.json()["meta_info"]["input_token_logprobs"]) == 200


def test_turn_two_elsewhere_finds_turn_one(direct: Direct) -> None:
    """Two answers to a prompt are nothing for a receiver. So the session goes on at the other decode worker,
    and the router first waits for the receiver's pages.
    """
    session, prompt = {"x-session-id": "elsewhere"}, token_ids(33, 500)
    first = generate(direct.router, prompt, 150, **session)
    assert first.headers["x-pdserve-plan"].startswith(DIRECT)
    conversation = [*prompt, *first.json()["output_ids"], *token_ids(34, 30)]
    body = {"model": "demo-tiny", "prompt": conversation, "max_tokens": 4, "n": 2}
    second = http.post(f"{direct.router.url}/v1/completions", json=body, headers=session, timeout=60.0)
    words = second.headers["x-pdserve-plan"].split(", ")
    assert words[0] == "handoff=pool(only)"
    assert "settle=settled" in words
    assert "stage=ok" in words  # the sender serves the pool's way too
    cached = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= (len(prompt) + 149) // PAGE * PAGE
    third = generate(direct.router, conversation, **session)
    assert third.headers["x-pdserve-plan"].startswith(DIRECT)
    assert Answer.of(third.json()).tokens == Answer.of(direct.other.generate(conversation, NEW_TOKENS)).tokens


def test_a_client_that_leaves_leaves_nothing_behind(direct: Direct) -> None:
    """In a stream, and before its first token."""

    def idle(worker: Worker) -> bool:
        load = http.get(f"{worker.url}/pd/ready").json()["load"]
        return bool(
            load["running_requests"] == load["waiting_requests"] == 0 and load["free_kv_tokens"] >= before
        )

    before = http.get(f"{direct.receiver.url}/pd/ready").json()["load"]["free_kv_tokens"]
    for seed in range(3):
        with streaming(direct, token_ids(40 + seed, 900), 2000) as events:
            next(events)
        with contextlib.suppress(httpx.TimeoutException):
            body = {"input_ids": token_ids(50 + seed, 3500), "sampling_params": {"max_new_tokens": 3}}
            httpx.post(f"{direct.router.url}/generate", json=body, timeout=0.1)
    for worker in (direct.sender, direct.receiver):
        eventually(lambda worker=worker: idle(worker), f"{worker.name} is idle", 20.0)  # type: ignore[misc]
    assert http.get(f"{direct.sender.url}/pd/info").status_code == 200


def test_a_sender_that_hangs_costs_seconds_and_never_the_answer(direct: Direct, reference: Reference) -> None:
    prompts, expected = reference.prompts[-3:], reference.first[-3:]
    with direct.sender.hanging():
        answers = [Answer.of(generate(direct.router, prompt).json()) for prompt in prompts]
    assert differences(expected, answers, say(prompts)) == []
    assert sum(count for word, count in outcomes(direct).items() if word.startswith("prefill-")) >= 1
    eventually(lambda: not direct.router.lacks, "the worker is back", 30.0)


def test_a_pair_that_dies_bit_by_bit_costs_no_answer(direct: Direct, reference: Reference) -> None:
    """First the sender, with requests in all phases; a stream of the receiver goes on. Then the receiver, and
    the other decode worker continues that stream.
    """
    prompt, tokens = token_ids(60, 700), 400
    want = direct.other.generate(prompt, tokens)["output_ids"]
    prompts, expected = reference.prompts[-8:], reference.first[-8:]
    with streaming(direct, prompt, tokens) as events, ThreadPoolExecutor(8) as threads:
        next(events)
        running = [threads.submit(generate, direct.router, one) for one in prompts]
        running[0].result()
        direct.sender.kill()
        answers = [Answer.of(future.result().json()) for future in running]
        assert differences(expected, answers, say(prompts)) == []
        next(events)
        direct.receiver.kill()
        last = list(events)[-1]
    assert last["output_ids"] == want
    assert Answer.of(generate(direct.router, prompts[0]).json()).tokens == expected[0].tokens
