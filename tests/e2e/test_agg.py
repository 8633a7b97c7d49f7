"""One aggregated worker with HiCache and the pool, checksums off: the same answers as plain SGLang, and the
proof that the equality check would see a wrong page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdserve.pages import page_hashes
from tests.support.e2e.arena import flip, has_page, page_offset
from tests.support.e2e.cluster import PoolNode, Router, Worker, eventually
from tests.support.e2e.prompts import NEW_TOKENS, PAGE, Answer, differences
from tests.support.e2e.routed import say, wanted_hits
from tests.support.e2e.site import Reference, Site, ask_all

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

SEGMENTS = [4 * 2 * 32 * PAGE * 4] * 2
"""K and V of one float32 page of the tiny model: 4 layers, 2 heads of 32."""


@dataclass
class Agg:
    pool: PoolNode
    worker: Worker
    router: Router


@pytest.fixture(scope="module")
def agg(site: Site, agg_worker: Worker, run_dir: Path) -> Iterator[Agg]:
    with Router(run_dir, agg=[agg_worker], name="router-agg") as router:
        yield Agg(site.pools["aggpool"], agg_worker, router)


@pytest.mark.model_support("multi-head attention", "pool")
def test_answers_equal_plain_sglang_cold_warm_and_from_the_pool(agg: Agg, reference: Reference) -> None:
    described = say(reference.prompts)
    assert differences(reference.first, ask_all(agg.worker, reference.prompts), described) == []
    assert differences(reference.second, ask_all(agg.worker, reference.second_prompts), described) == []
    agg.worker.flush()
    bodies = [agg.worker.generate(prompt, NEW_TOKENS) for prompt in reference.second_prompts]
    assert differences(reference.second, [Answer.of(body) for body in bodies], described) == []
    metas = [body["meta_info"] for body in bodies]
    assert [meta["cached_tokens"] for meta in metas] == [*map(wanted_hits, reference.second_prompts)]
    # what an earlier prompt of this round brought to the device is found there, all the rest in the pool
    from_pool = sum((meta["cached_tokens_details"] or {}).get("storage", 0) for meta in metas)
    assert from_pool > 0.6 * sum(meta["cached_tokens"] for meta in metas)


def test_the_equality_check_fails_when_a_page_is_wrong(agg: Agg, reference: Reference) -> None:
    """Checksums are off here: the wrong page is delivered, and the check must see it."""
    i = reference.prompts.index(max(reference.prompts, key=len))
    prompt = reference.prompts[i]
    agg.worker.generate(prompt, 1)
    where = (agg.pool, *agg.worker.namespace, page_hashes(prompt, PAGE)[3], SEGMENTS)
    eventually(lambda: has_page(*where), "the page is committed", 10.0)
    offset, arena = page_offset(*where), agg.pool.arena
    flip(arena, offset, sum(SEGMENTS))
    agg.worker.flush()
    wrong = Answer.of(agg.worker.generate(prompt, NEW_TOKENS))
    flip(arena, offset, sum(SEGMENTS))
    assert len(differences([reference.first[i]], [wrong], str)) == 1
