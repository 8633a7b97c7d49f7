"""Prefill → pool → decode, with real SGLang: same answers as plain SGLang whatever the pages went through,
and pages really move. Two traps are avoided: exact tokens are compared in float32, and prompts are token ids,
since generated text does not always tokenise back to what was generated.
"""

from __future__ import annotations

import contextlib
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pdserve.kvpool.protocol.page_tag import TAG_BYTES
from pdserve.pages import page_hashes
from tests.support.e2e.arena import flip, page_offset
from tests.support.e2e.cluster import Router, Worker, eventually, free_port, http, metric
from tests.support.e2e.prompts import NEW_TOKENS, PAGE, Answer, differences, token_ids
from tests.support.e2e.routed import ask, found, generate, own_tokens, pull_ahead, say, wanted_hits
from tests.support.e2e.site import CHUNK_TOKENS, Cluster, Reference

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]


@pytest.mark.model_support("multi-head attention", "disaggregated")
def test_disaggregated_answers_equal_plain_sglang_and_come_from_the_pool(
    cluster: Cluster, reference: Reference
) -> None:
    answers, cached = ask(cluster.pairs[0], reference.prompts)
    assert differences(reference.first, answers, say(reference.prompts)) == []
    # Pages come from the decode worker's own caches where prompts share a prefix; else, all of them, from the
    # pool.
    assert cached == [wanted_hits(prompt) for prompt in reference.prompts]


def test_second_turns_equal_plain_sglang(cluster: Cluster, reference: Reference) -> None:
    answers, _ = ask(cluster.pairs[0], reference.second_prompts)
    assert differences(reference.second, answers, say(reference.second_prompts)) == []


def test_answers_after_flushing_the_workers_come_from_the_pool(
    cluster: Cluster, reference: Reference
) -> None:
    cluster.flush()
    prompts = reference.second_prompts
    answers, cached = ask(cluster.pairs[1], prompts)
    assert differences(reference.second, answers, say(prompts)) == []
    assert cached == [wanted_hits(prompt) for prompt in prompts]


@pytest.mark.model_support("multi-head attention", "restart")
def test_answers_after_restarting_the_pool_node_come_from_the_pool(
    cluster: Cluster, reference: Reference
) -> None:
    prompts, expected = reference.prompts[::4], reference.first[::4]
    ask(cluster.pairs[0], prompts)
    before = cluster.pool.status()
    cluster.pool.kill()
    cluster.pool.start()
    after = cluster.pool.status()
    assert after.incarnation != before.incarnation
    assert after.pages == before.pages
    wait_pool_up(cluster)
    cluster.flush()
    decode = cluster.decode[0]
    bodies = [decode.generate(prompt, NEW_TOKENS) for prompt in prompts]
    answers = [Answer.of(body) for body in bodies]
    assert differences(expected, answers, say(prompts)) == []
    cached = [body["meta_info"]["cached_tokens"] for body in bodies]
    assert cached == [wanted_hits(prompt) for prompt in prompts]


def wait_pool_up(cluster: Cluster) -> None:
    """Until every worker's HiCache finds the pool again: a prompt's pages reach it."""

    def stored(worker: Worker) -> bool:
        before = cluster.pool.status().pages
        worker.generate(token_ids(uuid.uuid4().int % 10**9, PAGE + 1), 1)
        with contextlib.suppress(AssertionError):
            eventually(lambda: cluster.pool.status().pages > before, "a new page", 1.0)
        return cluster.pool.status().pages > before

    for worker in cluster.workers:
        eventually(lambda worker=worker: stored(worker), f"{worker.name} writes to the pool", 60.0)  # type: ignore[misc]


def test_a_long_prompt_is_pulled_ahead_by_the_router_and_found_in_the_workers_own_memory(
    cluster: Cluster,
) -> None:
    """How much of it a routed request finds there is a matter of time."""
    prompt, other = token_ids(7000, 3000), token_ids(7001, 3000)
    assert sum(found(generate(cluster.pairs[0], prompt)).values()) == wanted_hits(prompt)
    counted = http.get(f"{cluster.pairs[0].url}/metrics").text
    assert 'pdserve_router_pull_ahead_total{outcome="ok"}' in counted
    assert "pull_ahead_total{" not in counted.replace('pull_ahead_total{outcome="ok"}', "")
    body = pull_ahead(cluster.prefill[0], cluster.decode[0], other)
    assert own_tokens(body) >= CHUNK_TOKENS
    assert body["meta_info"]["cached_tokens"] == wanted_hits(other)


def test_clients_are_told_what_was_cached_before_prefill(cluster: Cluster) -> None:
    """Of a new prompt nothing, however much prefill then put into the pool for the decode worker."""
    prompt = token_ids(79, 500)
    body = {"model": "demo-tiny", "prompt": prompt, "max_tokens": 4, "n": 2, "temperature": 1.0}
    url = f"{cluster.pairs[0].url}/v1/completions"
    usages = [http.post(url, json=body, timeout=60).json()["usage"] for _ in range(2)]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, wanted_hits(prompt)]
    assert [usage["prompt_tokens"] for usage in usages] == [500, 500]
    assert [usage["completion_tokens"] for usage in usages] == [8, 8]
    first, again = (generate(cluster.pairs[0], token_ids(80, 500)).json()["meta_info"] for _ in range(2))
    assert (first["cached_tokens"], again["cached_tokens"]) == (0, wanted_hits(prompt))
    assert again["cached_tokens_details"]["device"] == wanted_hits(prompt)


def test_prefill_reports_what_it_published(cluster: Cluster) -> None:
    prompt = token_ids(78, 1000)
    url = f"{cluster.prefill[0].url}/pd/prefill?endpoint=/v1/completions"
    report = http.post(url, json={"model": "demo-tiny", "prompt": prompt, "max_tokens": 5}, timeout=60).json()
    assert report["prompt_tokens"] == 1000
    assert report["cached"] == {"device": 0, "host": 0, "pool": 0}
    assert (report["published_pages"], report["missing_pages"]) == (1000 // PAGE, 0)
    assert report["missed"] == f"never_stored={999 // PAGE * PAGE}"
    assert report["prefill_ms"] > 0
    again = http.post(url, json={"model": "demo-tiny", "prompt": prompt}, timeout=60).json()
    assert again["cached"]["device"] == wanted_hits(prompt)
    assert (again["missing_pages"], again["missed"]) == (0, "")


def test_turn_two_at_once_on_other_workers_finds_turn_one(cluster: Cluster) -> None:
    """Prompt and output pages, by SGLang's own account."""
    pulled = expected = 0
    for i in range(3):
        session = {"x-session-id": f"turns-{i}"}
        first_prompt = token_ids(4000 + i, 500)
        # The session goes through the router that knows all workers; the next turn is sent to the other pair
        # by hand, after asking, as the router does, whether the first turn is settled.
        request_id = f"turn-{i}"
        first = generate(cluster.pairs[0], first_prompt, 80, **session, **{"x-request-id": request_id})
        output = [pair[1] for pair in first.json()["meta_info"]["output_token_logprobs"]]
        assert cluster.decode[0].has_settled(request_id)
        conversation = [*first_prompt, *output]
        second = generate(cluster.pairs[1], [*conversation, *token_ids(5000 + i, 30)], 4, **session)
        pulled += found(second)["pool"]
        expected += (len(conversation) - 1) // PAGE * PAGE
    assert pulled >= 0.99 * expected


def test_the_router_waits_for_turn_one_when_it_sends_turn_two_elsewhere(
    cluster: Cluster, run_dir: Path
) -> None:
    """Through a router alone: the decode worker of turn one is drained, and the next turn comes at once."""
    key, admin_port, session = "the-key-of-this-test", free_port(), {"x-session-id": "moving"}
    extra = {"admin": {"port": admin_port, "key": key}, "deadlines": {"settle_s": 5.0}}
    prompt = token_ids(6000, 400)
    with Router(run_dir, cluster.prefill, cluster.decode, name="router-moving", extra=extra) as router:
        first = generate(router, prompt, 100, **session)
        home = first.headers["x-pdserve-decode"]
        drain = f"http://127.0.0.1:{admin_port}/workers/{home}/drain"
        assert http.post(drain, headers={"authorization": f"Bearer {key}"}).json()["draining"]
        output = [pair[1] for pair in first.json()["meta_info"]["output_token_logprobs"]]
        conversation = [*prompt, *output]
        second = generate(router, [*conversation, *token_ids(6001, 20)], 4, **session)
    assert second.headers["x-pdserve-decode"] != home
    assert "settle=settled" in second.headers["x-pdserve-plan"].split(", ")
    meta = second.json()["meta_info"]
    assert meta["cached_tokens"] >= 0.99 * ((len(conversation) - 1) // PAGE * PAGE)


def test_a_corrupt_page_is_a_miss_and_the_answer_is_right(cluster: Cluster, reference: Reference) -> None:
    i = reference.prompts.index(max(reference.prompts, key=len))
    prompt = reference.prompts[i]
    generate(cluster.pairs[0], prompt)
    key, segments = page_hashes(prompt, PAGE)[3], [*[4 * 2 * 32 * PAGE * 4] * 2, TAG_BYTES]
    offset = page_offset(cluster.pool, *cluster.decode[0].namespace, key, segments)
    flip(cluster.pool.arena, offset + 1000, 1)
    cluster.flush()
    body = cluster.decode[0].generate(prompt, NEW_TOKENS)
    assert differences([reference.first[i]], [Answer.of(body)], str) == []
    assert body["meta_info"]["cached_tokens"] == 3 * PAGE  # the chain up to the corrupt page
    assert metric(cluster.decode[0].url, "pdserve_pool_client_pages_total", result="corrupt") == 1.0


def test_requests_complete_when_the_pool_node_dies_before_and_during_them(
    cluster: Cluster, reference: Reference
) -> None:
    prompts = reference.prompts[-12:]
    expected = reference.first[-12:]
    cluster.flush()
    killed_at = 4
    answers = []
    for i, prompt in enumerate(prompts):
        if i == killed_at:
            cluster.pool.kill()
        answers.append(ask(cluster.pairs[0], [prompt])[0][0])
    assert differences(expected, answers, say(prompts)) == []
    cluster.pool.start()
    wait_pool_up(cluster)
    cluster.flush()
    answers, _ = ask(cluster.pairs[1], prompts)
    assert differences(expected, answers, say(prompts)) == []


def test_requests_complete_when_the_pool_node_dies_under_load(cluster: Cluster, reference: Reference) -> None:
    """Killed while requests are in all phases at once."""
    prompts = reference.prompts[-16:]
    cluster.flush()
    with ThreadPoolExecutor(8) as threads:
        running = [threads.submit(ask, cluster.router, [prompt]) for prompt in prompts]
        running[2].result()
        cluster.pool.kill()
        answers = [future.result()[0][0] for future in running]
    assert differences(reference.first[-16:], answers, say(prompts)) == []
    cluster.pool.start()
    wait_pool_up(cluster)


def test_a_prefill_worker_that_hangs_costs_time_and_never_the_answer(
    cluster: Cluster, reference: Reference
) -> None:
    prompts, expected = reference.prompts[-3:], reference.first[-3:]
    with cluster.prefill[1].hanging():
        responses = [generate(cluster.pairs[1], prompt) for prompt in prompts]
    answers = [Answer.of(response.json()) for response in responses]
    assert differences(expected, answers, say(prompts)) == []
    plans = [response.headers["x-pdserve-plan"] for response in responses]
    assert "stage=ok" not in plans[-1], "the router has given up waiting for it"
    eventually(lambda: not cluster.pairs[1].lacks, "the worker is back", 60.0)
