"""Whose pages a real worker's are: each tenant's are stored and found in a namespace of its own."""

from __future__ import annotations

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


@pytest.mark.parametrize("whole", [False, True])
def test_deleted_pages_are_found_neither_in_the_pool_nor_at_the_worker(
    agg_worker: Worker, site: Site, whole: bool
) -> None:
    for tenant in ("gone", "stays"):
        cached(agg_worker, f"tenant/{tenant}")
        eventually(lambda tenant=tenant: pages_of(site.pools["aggpool"]).get(tenant, 0) >= 8, "stored", 20)  # type: ignore[misc]
    assert cached(agg_worker, "tenant/gone") == 8 * PAGE
    body = {"tenant": "gone"} if whole else {"input_ids": PROMPT}
    headers = {"x-pdserve-cache-salt": '"tenant/gone"'}
    told = http.post(f"{agg_worker.url}/pool/erase", json=body, headers=headers, timeout=60.0).json()
    assert told["problems"] == {}
    assert told["pages"][site.pools["aggpool"].name] >= 8  # copies in tiers count too
    assert [cached(agg_worker, f"tenant/{tenant}") for tenant in ("gone", "stays")] == [0, 8 * PAGE]
