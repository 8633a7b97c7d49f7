"""What SGLang is told of the pool as its storage."""

from __future__ import annotations

import pytest

from pdserve.engine.sglang.storage import HUGE_PAGES_ENV, pool_storage
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.pages import KvGeometry

GEOMETRY = KvGeometry(
    model="m", dtype="d", kv_dtype="d", page_size="4", layout="page_first", tp_size="1", pp_size="1"
)


@pytest.mark.parametrize(
    ("mover", "huge", "allocator"), [(True, "", "shm"), (False, "", None), (True, "2MB", None)]
)
def test_the_host_pool_is_shared_for_a_page_mover_but_keeps_its_huge_pages(
    mover: bool, huge: str, allocator: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang makes no shared host pool of huge pages; then its scheduler moves pages itself, and says so."""
    monkeypatch.setenv(HUGE_PAGES_ENV, huge)
    told = pool_storage(PoolClientConfig(page_mover=mover), "ns", GEOMETRY)
    assert told.get("allocator") == allocator
