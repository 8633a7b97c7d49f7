"""Weights that only a tier has, as after a reboot: they come up ahead of reads, and are read as they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.kvpool.node.config import TierConfig
from pdserve.kvpool.weights import streaming
from pdserve.kvpool.weights.names import ModelName
from pdserve.kvpool.weights.push import push
from pdserve.kvpool.weights.store import WeightStore
from pdserve.kvpool.weights.streaming import raise_first, weight_files
from tests.support.kvpool.local_node import LocalNode
from tests.support.kvpool.models import MIB, ROOMY, read_tensors, store_of, tensors_of, write_model
from tests.support.kvpool.nodes import Start
from tests.support.waiting import until

MODEL = ModelName("demo", "1")
TENSORS = tensors_of(5 * MIB, 6 * MIB, 300_000)


@pytest.fixture
def node(start: Start, tmp_path: Path) -> LocalNode:
    """Its memory is empty, its tier has a model."""
    tier = TierConfig(kind="ssd", path=tmp_path / "tier", capacity_bytes=128 << 20, write="all")
    node = start(**{**ROOMY, "capacity_bytes": 384 << 20}, tiers=[tier])  # a 16th is loaded ahead at a time
    with store_of(node) as store:
        push(store, write_model(tmp_path / "model", TENSORS), MODEL)
        until(lambda: all(tier >= memory for memory, tier in pages_of(store)))
    node.kill()
    for name in ("arena", "table"):
        (node.config.arena_dir / node.config.name / name).unlink()
    node.restart()
    return node


def pages_of(store: WeightStore) -> list[tuple[int, int]]:
    """In memory and in the tier, for each namespace of weights."""
    [report] = store.content.status().values()
    return [(one.pages, one.tier_pages) for one in report.namespaces if one.name.startswith("weights")]


def test_pages_are_loaded_from_a_tier_before_anybody_reads_them(node: LocalNode) -> None:
    with store_of(node) as store:
        manifest, reader = store.manifest(MODEL), store.reader(MODEL)
        files = weight_files(reader, manifest)
        before = sum(memory for memory, _ in pages_of(store))
        raise_first(reader, files)
        wanted = len({piece.key for file in files for piece in file.pieces})
        until(lambda: sum(memory for memory, _ in pages_of(store)) >= before + wanted)


def test_a_model_in_a_tier_is_read_as_it_was_pushed(node: LocalNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches, most of which are asked for ahead."""
    monkeypatch.setattr(streaming, "BATCH_BYTES", MIB)
    with store_of(node) as store:
        reader = store.reader(MODEL)
        assert read_tensors(store, MODEL, reader) == TENSORS
        assert reader.from_tiers
