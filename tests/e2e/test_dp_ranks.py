"""A worker of two data parallel ranks: a conversation finds its pages in the memory of the rank that it is
sent to, and each rank finds those of the other in the pool.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.e2e.cluster import Worker, eventually
from tests.support.e2e.prompts import NEW_TOKENS, PAGE, Answer, differences, token_ids
from tests.support.e2e.routed import say, wanted_hits
from tests.support.e2e.site import Reference, Site

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(1200)]

CHOSEN = slice(-9, -4)


@pytest.fixture(scope="module")
def replicas(site: Site) -> Worker:
    return site.servers.workers["replicas"]


def places(bodies: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Of each answer: the rank, and the tokens that it found in its own memory."""
    details = [body["meta_info"]["cached_tokens_details"] or {} for body in bodies]
    found = [one.get("device", 0) + one.get("host", 0) for one in details]
    return [(body["meta_info"]["dp_rank"], tokens) for body, tokens in zip(bodies, found, strict=True)]


@pytest.mark.model_support("multi-head attention", "DP")
def test_a_conversation_goes_on_at_the_rank_that_has_it(replicas: Worker, reference: Reference) -> None:
    prompts, turns = reference.prompts[CHOSEN], reference.second_prompts[CHOSEN]
    first = [replicas.generate(prompt, NEW_TOKENS) for prompt in prompts]
    assert differences(reference.first[CHOSEN], [*map(Answer.of, first)], say(prompts)) == []
    ranks = [rank for rank, _ in places(first)]
    assert {*ranks} == {0, 1}
    second = [replicas.generate(turn, NEW_TOKENS) for turn in reversed(turns)][::-1]
    assert differences(reference.second[CHOSEN], [*map(Answer.of, second)], say(turns)) == []
    conversations = [len(prompt) + NEW_TOKENS - 1 for prompt in prompts]
    assert places(second) == [(r, n // PAGE * PAGE) for r, n in zip(ranks, conversations, strict=True)]


def test_a_rank_finds_what_the_other_computed_in_the_pool(site: Site, replicas: Worker) -> None:
    prompt, pool = token_ids(8800, 500), site.pools["pool0"]
    before = pool.status().pages
    cold = replicas.generate(prompt, NEW_TOKENS, routed_dp_rank=0)
    stored = (len(prompt) + NEW_TOKENS - 1) // PAGE
    eventually(lambda: pool.status().pages == before + stored, "all pages are stored", 20.0)
    body = replicas.generate(prompt, NEW_TOKENS, routed_dp_rank=1)
    assert differences([Answer.of(cold)], [Answer.of(body)], str) == []
    assert places([cold, body]) == [(0, 0), (1, 0)]
    assert body["meta_info"]["cached_tokens_details"]["storage"] == wanted_hits(prompt)
