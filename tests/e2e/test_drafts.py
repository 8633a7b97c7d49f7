"""Speculative decoding: with a prompt's pages come the draft model's keys and values. So as many drafted
tokens are accepted after a hit in the pool as when all was computed, and answers are plain SGLang's.

Two kinds of draft models: another model, whose keys and values are a part of their own of each page; and a
layer of the model itself (MTP), whose keys and values are in the KV page. SGLang names pages of the second
kind by each token and the one after it, so that a page is looked up once two tokens follow it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdserve.pages import DRAFT, KV, page_hashes, part_suffix, pool_key
from tests.support.e2e.arena import drop_page, has_page
from tests.support.e2e.cluster import PoolNode, Router, Worker, eventually, http
from tests.support.e2e.prompts import NEW_TOKENS, PAGE, Answer, differences, token_ids
from tests.support.e2e.routed import found, generate, own_tokens, pull_ahead, say, wanted_hits
from tests.support.e2e.site import CHUNK_TOKENS, PULL_AHEAD, Reference, Site

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(1200)]

LONG = 40
LENGTHS = (64, 65, 66, 129, 130, 131, 500, 700)
LACKING = 3
"""The first page that lacks its draft part."""
SEGMENTS = [4 * 2 * 32 * PAGE * 4] * 2
"""Bytes of a page's draft part, keys and values: 4 layers, 2 KV heads, 32 numbers of 4 bytes."""


@dataclass
class Drafting:
    """One worker whose draft model is the demo model itself; and a pair of workers of a model with MTP."""

    pool: PoolNode
    other: Worker
    prefill: Worker
    decode: Worker
    router: Router


@pytest.fixture(scope="module")
def drafts(site: Site, run_dir: Path) -> Iterator[Drafting]:
    workers = [site.servers.workers[name] for name in ("drafted", "mtp-prefill", "mtp-decode")]
    with Router(run_dir, [workers[1]], [workers[2]], name="router-drafts", extra=PULL_AHEAD) as router:
        yield Drafting(site.pools["pool0"], *workers, router)


def accepted(bodies: Sequence[dict[str, Any]]) -> list[list[int]]:
    """For each answer: how often 0, 1, ... of the drafted tokens were right."""
    return [body["meta_info"]["spec_correct_drafts_histogram"] for body in bodies]


def assert_alike(prompts: list[list[int]], cold: list[dict[str, Any]], hit: list[dict[str, Any]]) -> None:
    """The same answers, drafted as well."""
    assert differences([*map(Answer.of, cold)], [*map(Answer.of, hit)], say(prompts)) == []
    assert accepted(hit) == accepted(cold)
    assert sum(sum(counts[1:]) for counts in accepted(cold)) > len(prompts)


@pytest.mark.model_support("multi-head attention", "speculative decoding")
def test_as_many_tokens_of_a_draft_model_are_accepted_after_a_hit_as_cold(
    drafts: Drafting, reference: Reference
) -> None:
    prompts = reference.prompts[1::6]
    cold = [drafts.other.generate(prompt, LONG) for prompt in prompts]
    drafts.other.flush()
    # the other way round, so that pages come to lie where those of other prompts were
    hit = [drafts.other.generate(prompt, LONG) for prompt in reversed(prompts)][::-1]
    assert_alike(prompts, cold, hit)
    assert [body["meta_info"]["cached_tokens"] for body in hit] == [*map(wanted_hits, prompts)]
    first = [Answer(one.tokens[:NEW_TOKENS], one.logprobs[:NEW_TOKENS]) for one in map(Answer.of, hit)]
    assert differences(reference.first[1::6], first, say(prompts)) == []


def test_a_page_without_its_draft_part_is_computed(drafts: Drafting) -> None:
    prompt = token_ids(8700, 500)
    cold = drafts.other.generate(prompt, LONG)
    key = pool_key(page_hashes(prompt, PAGE)[LACKING], part_suffix(b"", DRAFT, {KV: 0, DRAFT: 0}))
    where = (drafts.pool, *drafts.other.namespace, key, SEGMENTS)
    eventually(lambda: has_page(*where), "the part is stored", 10.0)
    drop_page(*where)
    drafts.other.flush()
    body = drafts.other.generate(prompt, LONG)
    assert_alike([prompt], [cold], [body])
    assert body["meta_info"]["cached_tokens"] == LACKING * PAGE


def test_a_pair_of_workers_hands_over_what_its_layer_for_drafts_needs(drafts: Drafting) -> None:
    prompts = [token_ids(8710 + length, length) for length in LENGTHS]
    cold = [drafts.prefill.generate(prompt, LONG) for prompt in prompts]
    responses = [generate(drafts.router, prompt, LONG) for prompt in prompts]
    assert_alike(prompts, cold, [response.json() for response in responses])
    looked_up = [wanted_hits(prompt[1:]) for prompt in prompts]
    assert [sum(found(response).values()) for response in responses] == looked_up


def test_a_prefill_waits_for_the_pages_that_drafts_name_by_two_tokens(drafts: Drafting) -> None:
    url = f"{drafts.prefill.url}/pd/prefill?endpoint=/v1/completions"
    for length, pages in ((128, 1), (129, 2), (500, 7)):
        body = {"model": "demo-tiny", "prompt": token_ids(8720 + length, length)}
        report = http.post(url, json=body).json()
        assert (report["published_pages"], report["missing_pages"]) == (pages, 0)


def test_turn_two_finds_what_turn_one_drafted(drafts: Drafting) -> None:
    prompt, request_id = token_ids(8730, 300), "drafted-turn"
    first = generate(drafts.router, prompt, 150, **{"x-request-id": request_id}).json()
    assert drafts.decode.has_settled(request_id)
    conversation = [*prompt, *Answer.of(first).tokens]
    second = [*conversation, *token_ids(8731, 30)]
    body = drafts.prefill.generate(second, NEW_TOKENS)
    assert body["meta_info"]["cached_tokens"] == (len(conversation) - 2) // PAGE * PAGE


def test_long_prompts_of_drafts_are_pulled_ahead(drafts: Drafting) -> None:
    prompt = token_ids(8740, 3000)
    body = pull_ahead(drafts.prefill, drafts.decode, prompt)
    assert own_tokens(body) >= CHUNK_TOKENS
    assert body["meta_info"]["cached_tokens"] == wanted_hits(prompt)
