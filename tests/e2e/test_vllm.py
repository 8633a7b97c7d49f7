"""Real vLLM workers and LMCache servers on a real pool, behind the router.

They take some minutes, and an environment of their own: without it they are skipped
(docs/other-engines.md).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.router.config.router import RouterConfig
from pdserve.router.config.tenants import Access
from pdserve.security.tokens import Secret
from tests.support.e2e.vllm import (
    AUTHORIZED,
    PYTHON,
    START_S,
    VllmCluster,
    ask,
    plain_vllm,
    until,
    vllm_cluster,
)
from tests.support.router.contract import ANY_ENGINE, Check
from tests.support.router.harness import routed

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.extended,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason=f"no vLLM at {PYTHON}: docs/other-engines.md says how to make it; "
        "PDSERVE_VLLM_PYTHON names another Python with vLLM and LMCache",
    ),
]

PROMPTS = [f"def add_{n}(a, b): return a + b  # " * (30 + n) for n in range(4)]
TOKENS = 24


def text_of(response: httpx.Response) -> str:
    return str(response.json()["choices"][0]["text"])


def cached_of(response: httpx.Response) -> int:
    details = response.json()["usage"]["prompt_tokens_details"] or {}
    return int(details.get("cached_tokens") or 0)


@pytest.fixture(scope="module")
def alone(
    small_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, str]:
    """What vLLM answers without LMCache, pool and router. The same in every run, so it is computed once."""
    kept = request.config.cache
    found: dict[str, str] = kept.get("vllm/alone", {}) if kept is not None else {}
    if found.keys() != set(PROMPTS):
        found = ask_alone(small_model, tmp_path_factory.mktemp("alone") / "vllm.log")
        if kept is not None:
            kept.set("vllm/alone", found)
    return found


def ask_alone(model: Path, log: Path) -> dict[str, str]:
    with plain_vllm(model, log) as url:
        body = {"model": "m", "max_tokens": TOKENS, "temperature": 0}
        return {prompt: text_of(ask(url, "/v1/completions", body | {"prompt": prompt})) for prompt in PROMPTS}


@pytest.fixture(scope="module")
def vllm(
    small_model: Path, alone: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmCluster]:
    """After `alone`, whose server would want the same memory and processors at the same time."""
    with vllm_cluster(small_model, tmp_path_factory.mktemp("run") / "c") as cluster:
        yield cluster


@pytest.mark.parametrize("check", ANY_ENGINE, ids=lambda check: check.__name__)
def test_vllm_passes_what_any_engine_must(vllm: VllmCluster, check: Check) -> None:
    async def main() -> None:
        url = vllm.workers["vllm1"]
        async with httpx.AsyncClient(
            base_url=url, headers=AUTHORIZED, timeout=120, trust_env=False
        ) as client:
            await check(client, "m")

    asyncio.run(main())


def test_disaggregated_answers_are_those_of_vllm_alone(vllm: VllmCluster, alone: dict[str, str]) -> None:
    for prompt in PROMPTS[:2]:
        answered = vllm.complete(prompt, TOKENS)
        assert text_of(answered) == alone[prompt]
        assert "stage=one-token" in answered.headers["x-pdserve-plan"]
        assert answered.headers["x-pdserve-prefill"] != answered.headers["x-pdserve-decode"]


def test_the_decode_worker_finds_in_the_pool_what_the_prefill_worker_computed(
    vllm: VllmCluster, alone: dict[str, str]
) -> None:
    """The two have nothing in common but the pool, and the decode worker has never seen the prompt."""
    prompt, before = PROMPTS[2], vllm.pool_pages()
    body = {"model": "m", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    computed = ask(vllm.workers["vllm0"], "/v1/completions", body, AUTHORIZED).json()["usage"][
        "prompt_tokens"
    ]
    until(lambda: vllm.pool_pages() >= before + computed // 64)
    body["max_tokens"] = TOKENS
    answered = ask(vllm.workers["vllm1"], "/v1/completions", body, AUTHORIZED)
    assert cached_of(answered) >= (computed - 1) // 64 * 64
    assert text_of(answered) == alone[prompt]


def test_streams_and_tools_pass(vllm: VllmCluster, alone: dict[str, str]) -> None:
    body = {"model": "m", "prompt": PROMPTS[0], "max_tokens": TOKENS, "temperature": 0, "stream": True}
    with httpx.stream(
        "POST", f"{vllm.url}/v1/completions", json=body, timeout=120.0, trust_env=False
    ) as stream:
        events = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(one)["choices"][0]["text"] for one in events[:-1]) == alone[PROMPTS[0]]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    chat: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "call f"}],
        "max_tokens": 8,
    }
    answered = ask(vllm.url, "/v1/chat/completions", chat | {"tools": [tool], "tool_choice": "auto"})
    assert answered.json()["choices"][0]["message"]["role"] == "assistant"


def test_salts_of_tenants_and_clients_keep_caches_apart(vllm: VllmCluster, alone: dict[str, str]) -> None:
    """A salt with a slash, which LMCache refuses, is a digest there."""
    prompt = PROMPTS[3]
    until(lambda: cached_of(vllm.complete(prompt, TOKENS, cache_salt="a/b")) > 0)
    body = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "cache_salt": "another"}
    answered = ask(vllm.workers["vllm1"], "/v1/completions", body, AUTHORIZED)  # by the router both are asked
    assert cached_of(answered) == 0
    assert text_of(answered) == alone[prompt]


def test_both_workers_can_be_aggregated_ones(vllm: VllmCluster, alone: dict[str, str]) -> None:
    access = Access(cluster_token=Secret(AUTHORIZED["authorization"].removeprefix("Bearer ")))
    config = RouterConfig(agg=(vllm.workers["vllm0"], vllm.workers["vllm1"]), access=access)

    async def asked() -> None:
        async with routed(config) as harness:
            for prompt in PROMPTS[:2]:
                body = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
                answered = await harness.post("/v1/completions", body, {"x-session-id": prompt[:9]})
                assert answered.json()["choices"][0]["text"] == alone[prompt]

    asyncio.run(asked())


def test_pages_are_there_after_the_worker_and_its_lmcache_server_were_killed(
    vllm: VllmCluster, alone: dict[str, str]
) -> None:
    before = vllm.complete(PROMPTS[0], TOKENS).json()["usage"]["prompt_tokens"]
    for name in ("vllm1", "lmcache1"):
        vllm.kill(name)
    until(lambda: not vllm.is_ready())
    until(vllm.is_ready, START_S)
    answered = vllm.complete(PROMPTS[0], TOKENS)
    assert text_of(answered) == alone[PROMPTS[0]]
    assert cached_of(answered) >= (before - 1) // 64 * 64


def test_a_pool_node_that_is_killed_costs_misses_and_no_answer(
    vllm: VllmCluster, alone: dict[str, str]
) -> None:
    vllm.kill("pool0")
    for prompt in PROMPTS:
        assert text_of(vllm.complete(prompt, TOKENS)) == alone[prompt]
    assert text_of(vllm.complete(PROMPTS[1] + "x", TOKENS))
