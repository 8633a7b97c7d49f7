"""Spans that show the pool's memory: no copy, no writes into the pool, and no other byte stays."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.errors import WeightsError
from pdserve.kvpool.protocol.page_bytes import aligned
from pdserve.kvpool.transports.private_memory import BLOCK_BYTES
from pdserve.kvpool.weights import catalog, reading, streaming
from pdserve.kvpool.weights.manifest import Piece, digest_of
from pdserve.kvpool.weights.names import ModelName
from pdserve.kvpool.weights.push import push
from pdserve.kvpool.weights.span_memory import Buffers, LentSpan, can_lend
from pdserve.kvpool.weights.store import WeightStore
from pdserve.kvpool.weights.streaming import stream, weight_files
from tests.support.kvpool.local_node import LocalNode
from tests.support.kvpool.models import MIB, ROOMY, store_of, tensors_in, tensors_of, write_model
from tests.support.kvpool.nodes import Start
from tests.support.suite.extended import extended

MODEL, OTHER = ModelName("demo", "1"), ModelName("demo", "2")
TENSORS = tensors_of(5 * MIB, 6 * MIB, 7 * MIB)


@pytest.fixture
def node(start: Start) -> LocalNode:
    return start(**{**ROOMY, "capacity_bytes": 32 << 20})  # with room for one model


@pytest.fixture
def store(node: LocalNode, tmp_path: Path) -> Iterator[WeightStore]:
    with store_of(node) as store:
        push(store, write_model(tmp_path / "model", TENSORS), MODEL)
        yield store


@pytest.fixture(autouse=True)
def nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A span is given out once it is read: so pages can be taken away that are in use."""
    monkeypatch.setattr(reading, "PAUSE_S", 0.0)
    monkeypatch.setattr(streaming, "BATCH_BYTES", MIB)
    monkeypatch.setattr(streaming.read_ahead, "__defaults__", (0, 2))


def spans(store: WeightStore) -> Any:
    reader, manifest = store.reader(MODEL), store.manifest(MODEL)
    return stream(reader, manifest, weight_files(reader, manifest))


def refill(store: WeightStore, tmp_path: Path) -> None:
    """Remove the model, and fill its memory with another one."""
    catalog.remove(store, MODEL)
    push(store, write_model(tmp_path / "other", tensors_of(5 * MIB, 6 * MIB, 7 * MIB, seed=70)), OTHER)


def test_pages_of_a_node_of_this_host_are_not_copied(store: WeightStore, node: LocalNode) -> None:
    """What the node's memory is changed to behind its back, shows."""
    running = spans(store)
    filled = next(running)
    part = slice(2000, 2100)
    before = filled.data[part].tobytes()
    arena = np.memmap(node.arena_path, dtype=np.uint8, mode="r+")
    place = arena.tobytes().find(before)
    arena[place] ^= 1
    assert filled.data[part].tobytes() != before
    arena[place] ^= 1
    running.close()


def test_what_a_caller_writes_into_its_tensors_stays_with_it(store: WeightStore) -> None:
    for filled in spans(store):
        filled.data[:] = 0
    assert {name: data for filled in spans(store) for name, data in tensors_in(filled).items()} == TENSORS


def test_a_caller_that_keeps_all_tensors_has_them_whatever_becomes_of_the_model(
    store: WeightStore, tmp_path: Path
) -> None:
    kept = list(spans(store))
    assert all(filled.lent is not None for filled in kept)
    refill(store, tmp_path)
    assert {name: data for filled in kept for name, data in tensors_in(filled).items()} == TENSORS


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("later", [0, extended(1), extended(2)])
def test_pages_that_were_taken_away_while_they_were_used_end_the_load(
    store: WeightStore, tmp_path: Path, keeps: bool, later: int
) -> None:
    running = spans(store)
    kept = [next(running) for _ in range(1 + later)]
    refill(store, tmp_path)
    if not keeps:
        kept.clear()
        gc.collect()
    with pytest.raises(
        WeightsError, match=r"demo@1: model\.safetensors: page [0-9a-f]{16} (was taken|is not)"
    ):
        for _ in running:
            pass


def test_a_load_that_ends_early_is_settled_too(store: WeightStore, tmp_path: Path) -> None:
    running = spans(store)
    filled = next(running)
    refill(store, tmp_path)
    assert tensors_in(filled) != {name: TENSORS[name] for name in tensors_in(filled)}
    with pytest.raises(WeightsError, match="was taken away while it was loaded"):
        running.close()


def test_a_page_that_left_with_right_bytes_in_its_place_harms_nobody(store: WeightStore) -> None:
    running = spans(store)
    filled = next(running)
    catalog.remove(store, MODEL)  # its memory is free, and nothing fills it
    running.close()
    assert tensors_in(filled) == {name: TENSORS[name] for name in tensors_in(filled)}


class Place:
    """A page in shared memory, shown by a span; what becomes of it is said by the test."""

    def __init__(self, file: int) -> None:
        os.pwrite(file, b"\1" * BLOCK_BYTES, 0)
        piece = Piece(b"", digest_of(np.ones(BLOCK_BYTES, np.uint8)), BLOCK_BYTES, BLOCK_BYTES)
        self.span = LentSpan("f", 0, [(0, piece)])
        self.when_asked: Callable[[], None] = lambda: None
        self.is_held = self.is_refilled = False
        region, start, size_bytes = self.span.place_of((0, piece))
        region.show(file, 0, start, size_bytes)
        assert self.span.take((0, piece), self)  # type: ignore[arg-type]

    def holds(self) -> bool:
        held = self.is_held
        self.when_asked()
        return held

    def was_refilled(self) -> bool:
        return self.is_refilled


@pytest.fixture
def file() -> Iterator[int]:
    with tempfile.TemporaryFile(dir="/dev/shm") as opened:
        yield opened.fileno()


def test_whoever_uses_a_span_while_it_is_checked_does_not_see_what_comes_into_its_place(file: int) -> None:
    place = Place(file)
    used = [place.span.data(BLOCK_BYTES)]
    seen: set[int] = set()

    def refill_and_use() -> None:
        os.pwrite(file, b"\2" * BLOCK_BYTES, 0)
        seen.update(used.pop().tolist())

    place.is_held, place.when_asked = True, refill_and_use
    place.span.settle("demo@1")
    assert seen == {1}


def test_right_bytes_in_a_place_that_another_page_had_meanwhile_prove_nothing(file: int) -> None:
    place = Place(file)
    place.span.settle("demo@1")
    place = Place(file)
    place.is_refilled = True
    with pytest.raises(WeightsError, match="was taken away while it was loaded"):
        place.span.settle("demo@1")


def test_a_page_that_came_back_into_its_place_ends_the_load(store: WeightStore, tmp_path: Path) -> None:
    running = spans(store)
    filled = next(running)
    was = tensors_in(filled)
    refill(store, tmp_path)
    assert tensors_in(filled) != was
    catalog.remove(store, OTHER)
    push(store, tmp_path / "model", MODEL)
    with pytest.raises(WeightsError, match="was taken away while it was loaded"):
        running.close()


def test_only_pages_that_lie_in_a_file_as_in_memory_are_shown() -> None:
    whole, part = Piece(b"", b"", 8192, 8192), Piece(b"", b"", 5, 8192)
    assert can_lend(100, [(100, whole), (8292, part)])
    assert not can_lend(100, [(100, part), (105, whole)])
    assert not can_lend(101, [(100, whole)])
    assert not can_lend(0, [(0, Piece(b"", b"", 5000, 5000))])
    assert not can_lend(0, [])


def test_a_buffer_that_comes_back_while_another_is_taken_holds_up_nobody() -> None:
    """Arrays in cycles are freed whenever the collector runs, also inside `take`."""
    buffers, taken = Buffers(), threading.Event()

    def take_while_the_collector_runs() -> None:
        before = gc.get_threshold()
        try:
            for n in range(100):
                gc.disable()
                cycle: list[Any] = [buffers.take(1000)]
                cycle.append(cycle)
                del cycle
                gc.set_threshold(1 + n % 25)
                gc.enable()
                buffers.take(1000)
                gc.set_threshold(*before)
        finally:
            gc.set_threshold(*before)
            gc.enable()
        taken.set()

    threading.Thread(target=take_while_the_collector_runs, daemon=True).start()
    assert taken.wait(20.0)


def test_buffers_begin_where_a_page_of_memory_does() -> None:
    buffers = Buffers()
    assert [buffers.take(size).ctypes.data % 4096 for size in (1, 1000, 5 * MIB)] == [0, 0, 0]
    assert aligned(0).size == 0
