"""Over any mix of requests a tenant is charged what SGLang counts: each prompt once, and each output token.

tests/e2e/test_charges.py asks real workers the same.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.router.config.tenants import Tenant
from pdserve.router.tenants.tenant import TenantState
from tests.support.router.counting_worker import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    TOKENIZE,
    CountingWorker,
    asked,
    events,
    tokenized,
)
from tests.support.router.harness import Harness, disagg
from tests.support.suite.extended import examples

KEY = "k" * 40
HEADERS = {"authorization": f"Bearer {KEY}"}
TIMEOUT_S = 30.0

texts = st.integers(1, 12).map(lambda count: " ".join(["word", "wörter", "x"][i % 3] for i in range(count)))
token_ids = st.lists(st.integers(0, 99), min_size=1, max_size=12)
lengths = st.lists(st.integers(1, 6), min_size=1, max_size=4)
numbers = st.none() | st.integers(1, 3)
prompts = st.one_of(
    texts, token_ids, st.lists(texts, min_size=1, max_size=3), st.lists(token_ids, min_size=1, max_size=3)
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from([CHAT, COMPLETIONS, GENERATE, TOKENIZE]))
    if path == TOKENIZE:
        return path, {"model": "m", "prompt": draw(texts | st.lists(texts, min_size=1, max_size=3))}
    body: dict[str, Any] = {"model": "m", "test_lengths": draw(lengths)}
    if path == CHAT:
        contents = draw(st.lists(texts, min_size=1, max_size=3))
        body["messages"] = [{"role": "user", "content": content} for content in contents]
        if draw(st.booleans()):
            body["input_ids"] = draw(token_ids)
    else:
        prompt = draw(prompts)
        is_text = isinstance(prompt[0], str)
        name = "prompt" if path == COMPLETIONS else "text" if is_text else "input_ids"
        body[name] = prompt
    n = draw(numbers)
    if path == GENERATE:
        body["sampling_params"] = {"n": n or 1} | draw(st.sampled_from([{}, {"temperature": 0}]))
    else:
        body |= {"n": n} if n else {}
        if path == COMPLETIONS and (best_of := draw(numbers)):
            body["best_of"] = best_of
    if draw(st.booleans()):
        body |= draw(streaming(path, body))
    return path, body


@st.composite
def streaming(draw: st.DrawFn, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A stream that ends, or one that its client leaves where it can be told what it got: by marks, by
    SGLang's own events, or by usage in all events.
    """
    one = asked(path, body)
    is_counted = path == GENERATE or not one.is_batch
    options = draw(
        st.sampled_from([{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}])
    )
    more: dict[str, Any] = {"stream": True}
    if path != GENERATE and draw(st.booleans()):
        more["stream_options"] = options
        is_counted = is_counted or "continuous_usage_stats" in options
    if is_counted and draw(st.booleans()):
        heard_all = len(one.lengths)  # then each prompt has said its tokens
        more["test_held_after"] = draw(st.integers(heard_all, sum(one.lengths)))
    return more


def counts_of(path: str, body: dict[str, Any]) -> tuple[int, int]:
    """What SGLang counts: the oracle."""
    if path == TOKENIZE:
        count = tokenized(body)["count"]
        return count if isinstance(count, int) else sum(count), 0
    one = asked(path, body)
    held = body.get("test_held_after")
    delivered = sum(one.lengths) if held is None else held  # an event is a token
    return one.usage[0], delivered


async def ask(harness: Harness, path: str, body: dict[str, Any]) -> None:
    if "test_held_after" not in body:
        assert (await harness.post(path, body, HEADERS)).status == 200
        return
    wanted = b"".join(list(events(path, body, asked(path, body)))[: body["test_held_after"]])
    client = await harness.connect()
    await client.send(path, json.dumps(body).encode(), HEADERS)
    assert (await client.head()).status == 200
    seen = b""
    while len(seen) < len(wanted):
        seen += await client.chunk()
    client.leave()


async def charge(harness: Harness, mix: list[tuple[str, dict[str, Any]]]) -> tuple[tuple[int, int], float]:
    """(prompt and output tokens, what left the bucket) of a mix of requests at the same time."""
    tenant: TenantState = harness.router.gate.tenants.all[0]
    prompt, output, spent = tenant.use.prompt_tokens, tenant.use.output_tokens, tenant.charged_tokens
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*(ask(harness, path, body) for path, body in mix))
        await harness.settle()
    use = tenant.use
    return (use.prompt_tokens - prompt, use.output_tokens - output), tenant.charged_tokens - spent


@pytest.mark.parametrize("prefill", [0, 1])
def test_the_charge_of_any_mix_equals_what_sglang_counts(
    prefill: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_API_KEYS", f"acme={KEY}")
    tenants = (Tenant(name="acme", tokens_min=10**9),)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        opened = disagg(prefill=prefill, make=CountingWorker, tenants=tenants)
        harness, _, _ = runner.run(opened.__aenter__())

        @settings(max_examples=examples(150), deadline=None, derandomize=True, database=None)
        @given(st.lists(requests(), min_size=1, max_size=4))
        def check(mix: list[tuple[str, dict[str, Any]]]) -> None:
            expected = tuple(map(sum, zip(*(counts_of(path, body) for path, body in mix), strict=True)))
            assert runner.run(charge(harness, mix)) == (expected, sum(expected))

        try:
            check()
        finally:
            runner.run(opened.__aexit__(None, None, None))
