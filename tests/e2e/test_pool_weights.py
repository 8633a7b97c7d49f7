"""Weights from the pool: a worker answers as from the same files on disk, and loads no damaged page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.weights.names import ModelName
from pdserve.kvpool.weights.push import push
from pdserve.kvpool.weights.store import WeightStore
from pdserve.pages import model_fingerprint
from tests.support.e2e.arena import flip, page_offset
from tests.support.e2e.cluster import PoolNode, Worker, eventually
from tests.support.e2e.prompts import differences
from tests.support.e2e.site import Reference, ask_all, engine_settings

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(600)]
MODEL = ModelName("demo-weights", "1")
PROMPTS = 24


@pytest.fixture(scope="module")
def node(run_dir: Path) -> Iterator[PoolNode]:
    with PoolNode(run_dir, "weights0", capacity="256MiB") as node:
        yield node


@pytest.fixture(scope="module")
def store(node: PoolNode, model: Path) -> Iterator[WeightStore]:
    with WeightStore(PoolClientConfig(nodes=[PoolNodeRef(**node.ref)])) as store:
        push(store, model, MODEL)
        yield store


def worker_of(run_dir: Path, node: PoolNode, name: str, **settings: Any) -> Worker:
    engine = engine_settings(Path("-"), model_path=f"pdserve://pool/{MODEL}")
    return Worker("agg", name, run_dir, engine, pool={"nodes": [node.ref]}, settings=settings)


def test_answers_with_weights_of_the_pool_equal_those_from_disk(
    node: PoolNode, store: WeightStore, model: Path, run_dir: Path, reference: Reference
) -> None:
    with worker_of(run_dir, node, "of-pool") as worker:
        answers = ask_all(worker.wait_ready(), reference.prompts[:PROMPTS])
    assert differences(reference.first[:PROMPTS], answers, lambda i: f"prompt {i}") == []
    # and its KV pages are those of workers that start from the directory
    assert store.manifest(MODEL).fingerprint == model_fingerprint(model)


def test_a_damaged_page_of_weights_ends_the_start_and_is_named(
    node: PoolNode, store: WeightStore, run_dir: Path
) -> None:
    file = store.manifest(MODEL).find("model.safetensors")
    assert file is not None
    page = file.pieces[len(file.pieces) // 2]
    flip(node.arena, page_offset(node, "weights", {"weights": "1"}, page.key, [page.stored]), 1)
    with worker_of(run_dir, node, "of-damaged-pool", storage="none") as worker:
        eventually(lambda: not worker.is_running, "the worker ended", 240.0)
        assert worker.process is not None
        said = worker.process.tail()
    assert f"model.safetensors: page {page.key.hex()[:16]} is damaged" in said
    assert f"push {MODEL} again" in said
