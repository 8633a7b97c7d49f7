"""A prefill and a decode worker that keep no pages in host memory: the same answers as plain SGLang, and
pages come from the pool whenever the device has none. Further tests of this pair are in test_disagg.py.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.e2e.cluster import Worker
from tests.support.e2e.prompts import NEW_TOKENS, Answer, differences, token_ids
from tests.support.e2e.routed import pull_ahead, say, wanted_hits
from tests.support.e2e.site import CHUNK_TOKENS, STAGED, Cluster, Reference

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


def test_pages_that_are_pulled_ahead_are_on_the_device_when_the_request_comes(cluster: Cluster) -> None:
    """And the answers are those of the worker that computed them."""
    prompt, prefill, decode = token_ids(8000, 3000), cluster.prefill[0], cluster.decode[1]
    body = pull_ahead(prefill, decode, prompt)
    assert body["meta_info"]["cached_tokens_details"]["device"] >= CHUNK_TOKENS
    assert body["meta_info"]["cached_tokens"] == wanted_hits(prompt)
    assert not body["meta_info"]["cached_tokens_details"].get("host")
    computed = prefill.generate(prompt, NEW_TOKENS)
    assert differences([Answer.of(computed)], [Answer.of(body)], say([prompt])) == []
