"""Requests through a router, and what their workers had cached."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import httpx

from tests.support.e2e.cluster import Router, Worker, eventually, http
from tests.support.e2e.prompts import NEW_TOKENS, PAGE, Answer, token_ids
from tests.support.e2e.site import CHUNK_TOKENS


def generate(router: Router, prompt: list[int], tokens: int = NEW_TOKENS, **headers: str) -> httpx.Response:
    """One greedy request through the router."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    return http.post(f"{router.url}/generate", json=body, headers=headers, timeout=120.0)


def ask(router: Router, prompts: list[list[int]]) -> tuple[list[Answer], list[int]]:
    """Answers, one after the other, and the tokens of each prompt that the decode worker found."""
    responses = [generate(router, prompt) for prompt in prompts]
    assert [one.status_code for one in responses] == [200] * len(prompts), responses[0].text
    return [Answer.of(one.json()) for one in responses], [sum(found(one).values()) for one in responses]


def found(response: httpx.Response) -> dict[str, int]:
    """Prompt tokens that the decode worker itself found, by place; the answer tells what prefill found."""
    pairs = (pair.partition("=") for pair in response.headers["x-pdserve-cached"].split(", "))
    return {place: int(tokens) for place, _, tokens in pairs if place != "computed"}


def publishes(router: Router, seed: int) -> None:
    """Wait until what a prefill worker computes of a new prompt is found by the decode worker. Where pages
    did not come lately, as while a node was away, a prefill waits a moment for them, and a busy machine may
    take longer.
    """

    def is_found() -> bool:
        prompt = token_ids(seed + next(numbers), 4 * PAGE + 1)
        return sum(found(generate(router, prompt)).values()) == wanted_hits(prompt)

    numbers = itertools.count()
    eventually(is_found, f"{router.name}: pages are handed over", 60.0)


def say(prompts: list[list[int]]) -> Callable[[int], str]:
    return lambda i: f"prompt {i} ({len(prompts[i])} tokens)"


def wanted_hits(prompt: list[int]) -> int:
    """Tokens that SGLang looks up in storage: full pages of all but the last token."""
    return (len(prompt) - 1) // PAGE * PAGE


def all_computed(prompt: list[int]) -> str:
    """What a prefill worker says of a prompt of which it found nothing."""
    return f"device=0, host=0, pool=0, computed={len(prompt)}"


def pull_ahead(prefill: Worker, decode: Worker, prompt: list[int]) -> dict[str, Any]:
    """One worker stores a prompt, the other pulls it ahead, as the router asks them to. The second's answer.

    The router asks both at once, so there it is a matter of time how much is pulled ahead.
    """
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}
    for worker, route in ((prefill, "prefill"), (decode, "pull")):
        done = http.post(f"{worker.url}/pd/{route}?endpoint=/generate", json=body, timeout=120.0)
        assert done.status_code == 200, done.text
    assert done.json()["pulled_tokens"] >= CHUNK_TOKENS
    return decode.generate(prompt, NEW_TOKENS)


def own_tokens(body: dict[str, Any]) -> int:
    """Prompt tokens that the worker found in its own memory."""
    details = body["meta_info"]["cached_tokens_details"] or {}
    return int(details.get("device", 0) + details.get("host", 0))
