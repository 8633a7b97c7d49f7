"""A model with latent attention (MLA) on two ranks: all hold the same bytes, and the pool holds them once."""

from __future__ import annotations

import pytest

from tests.support.e2e.cluster import Worker, eventually
from tests.support.e2e.prompts import NEW_TOKENS, PAGE, Answer, differences, token_ids
from tests.support.e2e.routed import say, wanted_hits
from tests.support.e2e.site import Site

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def latent(site: Site) -> Worker:
    return site.servers.workers["latent"]


@pytest.mark.model_support("latent attention", "TP")
@pytest.mark.model_support("latent attention", "pool")
def test_pages_of_all_ranks_are_stored_once_and_give_the_same_answers(site: Site, latent: Worker) -> None:
    prompts = [token_ids(8500 + i, length) for i, length in enumerate((70, 500, 1000))]
    pool = site.pools["pool0"]
    before = pool.status().pages
    cold = [latent.generate(prompt, NEW_TOKENS) for prompt in prompts]
    assert [body["meta_info"]["cached_tokens"] for body in cold] == [0, 0, 0]
    stored = sum((len(prompt) + NEW_TOKENS - 1) // PAGE for prompt in prompts)
    eventually(lambda: pool.status().pages == before + stored, "all pages are stored", 20.0)
    latent.flush()
    bodies = [latent.generate(prompt, NEW_TOKENS) for prompt in prompts]
    assert differences([*map(Answer.of, cold)], [*map(Answer.of, bodies)], say(prompts)) == []
    assert [body["meta_info"]["cached_tokens"] for body in bodies] == [*map(wanted_hits, prompts)]
    assert pool.status().pages == before + stored
