"""A prefill and a decode worker that keep no pages in host memory: the same answers as plain SGLang, and
pages come from the pool whenever the device has none. Further tests of this pair are in test_disagg.py.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.e2e.cluster import Router, Worker, eventually
from tests.support.e2e.prompts import NEW_TOKENS, Answer, differences, token_ids
from tests.support.e2e.routed import found, generate, say, wanted_hits
from tests.support.e2e.site import CHUNK_TOKENS, PULL_AHEAD, STAGED, Cluster, Reference

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

AT_A_TIME = 8
PLACES = ("device", "host", "storage")


def ask_together(worker: Worker, prompts: list[list[int]]) -> tuple[list[Answer], list[dict[str, int]]]:
    """Answers, and what was cached of each prompt by place."""
    with ThreadPoolExecutor(AT_A_TIME) as threads:
        bodies = list(threads.map(lambda prompt: worker.generate(prompt, NEW_TOKENS), prompts))
    details = [body["meta_info"].get("cached_tokens_details") or {} for body in bodies]
    places = [{place: tokens for place, tokens in one.items() if place in PLACES} for one in details]
    return [Answer.of(body) for body in bodies], places


@pytest.mark.model_support("multi-head attention", "buffer only")
def test_prompts_that_neither_device_nor_host_memory_hold_are_answered_from_the_pool(
    cluster: Cluster, reference: Reference
) -> None:
    prompts = reference.second_prompts
    assert sum(map(len, prompts)) > 1.5 * STAGED["max_total_tokens"]
    worker = cluster.decode[1]
    worker.flush()
    ask_together(worker, prompts)  # so that the pool has them
    for _ in range(2):
        answers, places = ask_together(worker, prompts)
        assert differences(reference.second, answers, say(prompts)) == []
        assert sum(map(wanted_hits, prompts)) == sum(sum(place.values()) for place in places)
        assert sum(place.get("storage", 0) for place in places) > STAGED["max_total_tokens"] // 2
        assert not any(place.get("host") for place in places)


def test_a_worker_that_was_killed_answers_from_the_pool(cluster: Cluster, reference: Reference) -> None:
    prompts = reference.prompts[-8:]
    worker = cluster.decode[1]
    ask_together(worker, prompts)
    worker.end()
    worker.start().wait_ready()
    answers, places = ask_together(worker, prompts)
    assert differences(reference.first[-8:], answers, say(prompts)) == []
    found_tokens = [sum(place.values()) for place in places]
    assert found_tokens == [wanted_hits(prompt) for prompt in prompts]


def test_pages_that_are_pulled_ahead_are_on_the_device_when_the_request_comes(
    cluster: Cluster, run_dir: Path
) -> None:
    """And the answers are those of the worker that computed them."""
    router = Router(
        run_dir,
        prefill=[cluster.prefill[0]],
        decode=[cluster.decode[1]],
        name="router-pull",
        extra=PULL_AHEAD,
    )
    prompts = iter([token_ids(8000 + i, 3000) for i in range(10)])

    def pulled() -> bool:
        prompt = next(prompts)
        response = generate(router, prompt)
        where = found(response)
        assert sum(where.values()) == wanted_hits(prompt)
        computed = cluster.prefill[0].generate(prompt, NEW_TOKENS)
        assert differences([Answer.of(computed)], [Answer.of(response.json())], say([prompt])) == []
        assert not where.get("host")
        return where.get("device", 0) >= CHUNK_TOKENS

    try:
        router.start()
        eventually(pulled, "a chunk is pulled ahead", 120.0)
    finally:
        router.stop()
