"""LoRA adapters: answers with pages from the pool are those of a worker that computes all, and no page is
shared between an adapter and its base, or between two adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.e2e.adapters import make_adapter
from tests.support.e2e.cluster import PoolNode, Router, Worker, http, started
from tests.support.e2e.prompts import NEW_TOKENS, Answer, differences, token_ids
from tests.support.e2e.routed import all_computed, found, say, wanted_hits
from tests.support.e2e.site import engine_settings

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(1200)]

ADAPTERS = ("", "left", "right")
PROMPTS = [token_ids(500 + length, length) for length in (100, 640, 1001)]


@dataclass
class Adapted:
    """A disaggregated pair with two adapters."""

    prefill: Worker
    decode: Worker
    router: Router
    cold: dict[str, list[Answer]]
    """What a worker answers that finds no page, by adapter."""

    def ask(self, adapter: str) -> list[Any]:
        answers = [ask(self.router.url, adapter, prompt) for prompt in PROMPTS]
        assert [one.status_code for one in answers] == [200] * len(answers), answers[0].text
        return answers


def ask_cold(worker: Worker, adapter: str) -> list[Answer]:
    bodies = [ask(worker.url, adapter, prompt, cache_salt="cold").json() for prompt in PROMPTS]
    assert [body["meta_info"]["cached_tokens"] for body in bodies] == [0] * len(PROMPTS)
    return [Answer.of(body) for body in bodies]


def ask(url: str, adapter: str, prompt: list[int], **more: str) -> Any:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, **more}
    if adapter:
        body["lora_path"] = adapter
    return http.post(f"{url}/generate", json=body, timeout=120.0)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, model: Any) -> Iterator[Adapted]:
    run_dir = tmp_path_factory.mktemp("lora")
    paths = [
        f"{name}={make_adapter(run_dir / name, model, seed)}" for seed, name in enumerate(ADAPTERS) if name
    ]
    engine = engine_settings(model, extra_args=["--enable-lora", "--lora-paths", *paths])
    pool = PoolNode(run_dir)
    prefill, decode = (
        Worker(role, role, run_dir, engine, {"nodes": [pool.ref]}) for role in ("prefill", "decode")
    )
    with (
        started(pool, prefill, decode),
        Router(run_dir, [prefill], [decode], name="router-lora") as router,
    ):
        yield Adapted(prefill, decode, router, {name: ask_cold(decode, name) for name in ADAPTERS})


@pytest.mark.model_support("multi-head attention", "LoRA")
def test_adapters_answer_from_the_pool_as_cold_and_share_no_pages(adapted: Adapted) -> None:
    wanted = [wanted_hits(prompt) for prompt in PROMPTS]
    described = say(PROMPTS)
    for name in ADAPTERS:  # one after the other, with the same prompts: nothing of the others is found
        first = adapted.ask(name)
        assert differences(adapted.cold[name], [Answer.of(one.json()) for one in first], described) == [], (
            name
        )
        assert [one.headers["x-pdserve-prefill-cached"] for one in first] == list(
            map(all_computed, PROMPTS)
        ), name
        assert [found(one).get("pool", 0) for one in first] == wanted, name
    assert len({tuple(one.tokens for one in answers) for answers in adapted.cold.values()}) == len(ADAPTERS)
    for worker in (adapted.prefill, adapted.decode):
        worker.flush()
    for name in reversed(ADAPTERS):
        again = adapted.ask(name)
        assert differences(adapted.cold[name], [Answer.of(one.json()) for one in again], described) == [], (
            name
        )
        assert [found(one).get("pool", 0) for one in again] == wanted, name


def test_models_lists_adapters_and_a_request_names_one_by_the_models_name(adapted: Adapted) -> None:
    cards = http.get(f"{adapted.router.url}/v1/models").json()["data"]
    assert [(one["id"], one["parent"]) for one in cards] == [
        ("demo-tiny", None),
        ("demo-tiny:left", "demo-tiny"),
        ("demo-tiny:right", "demo-tiny"),
    ]
    texts = {}
    for name in ("demo-tiny", "demo-tiny:left", "demo-tiny:right"):
        body = {"model": name, "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0}
        answer = http.post(f"{adapted.router.url}/v1/completions", json=body, timeout=60.0)
        assert answer.status_code == 200, answer.text
        texts[name] = answer.json()["choices"][0]["text"]
    assert len(set(texts.values())) == 3
