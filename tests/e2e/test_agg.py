"""One aggregated worker with HiCache and the pool, checksums off: the same answers as plain SGLang, and the
proof that the equality check would see a wrong page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdserve.pages import page_hashes
from tests.support.e2e.arena import flip, page_offset
from tests.support.e2e.cluster import PoolNode, Router, Worker, eventually, http
from tests.support.e2e.prompts import NEW_TOKENS, PAGE, Answer, differences
from tests.support.e2e.site import Reference, Site, ask_all

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]


@dataclass
class Agg:
    pool: PoolNode
    worker: Worker
    router: Router


@pytest.fixture(scope="module")
def agg(site: Site, agg_worker: Worker, run_dir: Path) -> Iterator[Agg]:
    router = Router(run_dir, agg=[agg_worker], name="router-agg")
    try:
        router.start()
        yield Agg(site.pools["aggpool"], agg_worker, router)
    finally:
        router.stop()


def describe(prompts: list[list[int]]):  # type: ignore[no-untyped-def]
    return lambda i: f"prompt {i} ({len(prompts[i])} tokens)"


@pytest.mark.model_support("multi-head attention", "pool")
def test_answers_equal_plain_sglang_cold_warm_and_from_the_pool(agg: Agg, reference: Reference) -> None:
    say = describe(reference.prompts)
    assert differences(reference.first, ask_all(agg.worker, reference.prompts), say) == []
    assert differences(reference.second, ask_all(agg.worker, reference.second_prompts), say) == []
    agg.worker.flush()
    bodies = [agg.worker.generate(prompt, NEW_TOKENS) for prompt in reference.second_prompts]
    assert differences(reference.second, [Answer.of(body) for body in bodies], say) == []
    metas = [body["meta_info"] for body in bodies]
    assert [meta["cached_tokens"] for meta in metas] == [
        (len(prompt) - 1) // PAGE * PAGE for prompt in reference.second_prompts
    ]
    # what an earlier prompt of this round brought to the device is found there, all the rest in the pool
    from_pool = sum((meta["cached_tokens_details"] or {}).get("storage", 0) for meta in metas)
    assert from_pool > 0.6 * sum(meta["cached_tokens"] for meta in metas)


def test_the_equality_check_fails_when_a_page_is_wrong(agg: Agg, reference: Reference) -> None:
    """Checksums are off here: the wrong page is delivered, and the check must see it."""
    i = reference.prompts.index(max(reference.prompts, key=len))
    prompt = reference.prompts[i]
    agg.worker.generate(prompt, 1)
    info = http.get(f"{agg.worker.url}/pd/info").json()
    key = page_hashes(prompt, PAGE)[3]
    segments = page_segments(info)
    eventually(lambda: exists(agg, info, key, segments), "the page is committed", 10.0)
    offset = page_offset(agg.pool, info["namespace"], info["kv_geometry"], key, segments)
    arena = agg.pool.directory / "arena" / agg.pool.name / "arena"
    flip(arena, offset, sum(segments))
    agg.worker.flush()
    wrong = Answer.of(agg.worker.generate(prompt, NEW_TOKENS))
    flip(arena, offset, sum(segments))
    assert len(differences([reference.first[i]], [wrong], str)) == 1


def page_segments(info: dict[str, object]) -> list[int]:
    """K and V of one float32 page of the tiny model: 4 layers, 2 heads of 32, PAGE tokens."""
    return [4 * 2 * 32 * PAGE * 4] * 2


def exists(agg: Agg, info: dict[str, dict[str, str]], key: bytes, segments: list[int]) -> bool:
    try:
        page_offset(agg.pool, str(info["namespace"]), info["kv_geometry"], key, segments)
    except AssertionError:
        return False
    return True
