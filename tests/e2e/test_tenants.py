"""Whose pages a real worker's are: each tenant's are stored and found in a namespace of its own."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.kvpool.namespaces.tenants import split
from tests.support.e2e.cluster import PoolNode, Worker, eventually, http
from tests.support.e2e.prompts import PAGE, token_ids
from tests.support.e2e.site import Site

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

PROMPT = token_ids(7, 8 * PAGE + 1)


def pages_of(pool: PoolNode) -> dict[str, int]:
    """By tenant; those of nobody are the empty one's."""
    return {split(space.name)[1]: space.pages for space in pool.status().namespaces}


def in_both(pool: PoolNode, tenant: str) -> int:
    """The tenant's pages in memory and in the tier."""
    spaces = [space for space in pool.status().namespaces if split(space.name)[1] == tenant]
    return sum(space.pages + space.tier_pages for space in spaces)


def cached(worker: Worker, salt: str) -> int:
    """What was found of the prompt, in SGLang's own cache or the pool."""
    found: int = worker.generate(PROMPT, 1, cache_salt=salt)["meta_info"]["cached_tokens"]
    return found


def test_a_tenants_pages_are_stored_and_found_as_its_own(site: Site, agg_worker: Worker) -> None:
    pool, before = site.pools["aggpool"], pages_of(site.pools["aggpool"]).get("", 0)
    for salt in ("tenant/acme", "tenant/acme/own", "tenant/other"):
        assert cached(agg_worker, salt) == 0
    eventually(lambda: pages_of(pool).get("acme", 0) >= 16, "pages of two salts are stored", 20)
    eventually(lambda: pages_of(pool).get("other", 0) >= 8, "pages of the other tenant are stored", 20)
    assert pages_of(pool).get("", 0) == before
    agg_worker.flush()
    assert [cached(agg_worker, salt) for salt in ("tenant/acme", "tenant/other", "tenant/new")] == [
        8 * PAGE,
        8 * PAGE,
        0,
    ]


ERASED: dict[str, tuple[dict[str, Any], int]] = {
    "a prompt": ({"input_ids": PROMPT}, 8),
    "a tenant": ({"tenant": "gone"}, 16),  # pages of memory and of the tier are counted
    "a session": ({"session": "5e55"}, 11),  # with those of its answer
}


@pytest.mark.parametrize("what", ERASED)
def test_deleted_pages_are_found_neither_in_the_pool_nor_at_the_worker(
    agg_worker: Worker, site: Site, what: str
) -> None:
    pool, (body, pages) = site.pools["aggpool"], ERASED[what]
    if what == "a session":
        named = {"x-pdserve-session": "5e55 1"}
        agg_worker.generate(PROMPT, 3 * PAGE, cache_salt="tenant/gone", headers=named)
    for tenant in ("gone", "stays"):
        cached(agg_worker, f"tenant/{tenant}")
        eventually(lambda tenant=tenant: in_both(pool, tenant) >= 16, "stored", 20)  # type: ignore[misc]
    assert cached(agg_worker, "tenant/gone") == 8 * PAGE
    headers = {"x-pdserve-cache-salt": '"tenant/gone"'}
    told = http.post(f"{agg_worker.url}/pool/erase", json=body, headers=headers, timeout=60.0).json()
    turn = 1 if what == "a session" else 0
    assert told == {"pages": {pool.name: pages}, "problems": {}, "turn": turn}
    assert [cached(agg_worker, f"tenant/{tenant}") for tenant in ("gone", "stays")] == [0, 8 * PAGE]
    assert in_both(pool, "gone") <= 16, "what was computed anew, and nothing else"
