"""A model that embeds: its pages go to the pool, and tenants find none of each other's."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.e2e.cluster import PoolNode, Router, Worker, eventually, http, pdserve
from tests.support.e2e.prompts import PAGE, token_ids
from tests.support.e2e.site import Site

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(1200)]

TOKENS = 700
STORED = TOKENS // PAGE
LOOKED_UP = (TOKENS - 1) // PAGE


@dataclass
class Embedder:
    worker: Worker
    router: Router
    pool: PoolNode
    keys: dict[str, str]
    """Of tenants."""

    def embed(self, tenant: str, tokens: list[int]) -> list[float]:
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        body = {"model": "demo-tiny", "input": tokens}
        answer = http.post(f"{self.router.url}/v1/embeddings", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        [row] = answer.json()["data"]
        vector: list[float] = row["embedding"]
        return vector

    @property
    def space(self) -> Any:
        """The status of the worker's namespace."""
        name = http.get(f"{self.worker.url}/pd/info").json()["namespace"]
        return next(one for one in self.pool.status().namespaces if one.name == name)


@pytest.fixture(scope="module")
def embedder(site: Site, run_dir: Path) -> Iterator[Embedder]:
    worker = site.servers.workers["embedder"]
    file = run_dir / "keys"
    keys = {}
    for name in ("acme", "beta"):
        made = subprocess.run(
            pdserve("key", name, "--file", str(file)), capture_output=True, text=True, timeout=60, check=True
        )
        keys[name] = made.stdout.strip()
    with Router(run_dir, agg=[worker], name="router-embed", extra={"access": {"keys_file": file}}) as router:
        yield Embedder(worker, router, site.pools["pool0"], keys)


@pytest.mark.model_support("embedding", "pool")
@pytest.mark.model_support("embedding", "tenants' salt")
def test_tenants_find_no_pages_of_each_others_texts(embedder: Embedder) -> None:
    tokens = token_ids(9100, TOKENS)
    first = embedder.embed("acme", tokens)
    eventually(lambda: embedder.space.pages == STORED, "the pages are stored", 20.0)
    embedder.worker.flush()
    hits = embedder.space.hits
    assert embedder.embed("beta", tokens) == pytest.approx(first, abs=1e-4)
    eventually(lambda: embedder.space.pages == 2 * STORED, "they are stored under another name", 20.0)
    assert embedder.space.hits == hits
    embedder.worker.flush()
    assert embedder.embed("acme", tokens) == pytest.approx(first, abs=1e-4)
    assert embedder.space.hits == hits + LOOKED_UP
    assert embedder.space.pages == 2 * STORED
