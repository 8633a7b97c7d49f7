"""Models in real nodes: pushed, read back, shared, damaged, lost and removed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.errors import PoolError, WeightsError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.node.config import ClusterConfig
from pdserve.kvpool.weights import catalog
from pdserve.kvpool.weights import push as pushing
from pdserve.kvpool.weights.files import LOCK, alone_in, is_small, write_files
from pdserve.kvpool.weights.manifest import PAGE_BYTES
from pdserve.kvpool.weights.names import ModelName
from pdserve.kvpool.weights.push import push
from pdserve.kvpool.weights.store import WeightStore
from tests.support.kvpool.clustered import QUIET
from tests.support.kvpool.local_node import LocalNode
from tests.support.kvpool.models import (
    MIB,
    ROOMY,
    files_in,
    held_bytes,
    pool_config,
    read_tensors,
    store_of,
    tensors_of,
    write_model,
)
from tests.support.kvpool.nodes import Start
from tests.support.suite.extended import extended
from tests.support.waiting import SOON_S, until

BASE, TUNED = ModelName("demo", "1"), ModelName("demo", "2")
TENSORS = tensors_of(5 * MIB, 1 * MIB, 300_000, 9 * MIB + 17)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", TENSORS)


@pytest.fixture
def node(start: Start) -> LocalNode:
    return start(**ROOMY)


@pytest.fixture
def store(node: LocalNode) -> Iterator[WeightStore]:
    with store_of(node) as store:
        yield store


def pull(
    store: WeightStore, model: ModelName, directory: Path, wanted: Callable[..., bool] = lambda _: True
) -> None:
    write_files(store.reader(model), store.manifest(model), directory, wanted)


def states(store: WeightStore) -> dict[str, str]:
    return {str(entry.model): entry.state for entry in catalog.entries(store)}


def test_a_model_is_read_back_as_it_was_pushed_and_a_second_push_writes_nothing(
    store: WeightStore, model: Path, tmp_path: Path, node: LocalNode
) -> None:
    done = push(store, model, BASE)
    assert (done.was_there, done.warning) == (False, "")
    assert done.written_pages == done.pages > 10
    assert read_tensors(store, BASE) == TENSORS
    pull(store, BASE, tmp_path / "out")
    assert files_in(tmp_path / "out") == files_in(model)
    pull(store, BASE, tmp_path / "small", is_small)
    assert files_in(tmp_path / "small") == {
        path: data for path, data in files_in(model).items() if path != "model.safetensors"
    }
    assert states(store) == {"demo@1": "whole"}
    held = held_bytes(node)
    done = push(store, model, BASE)
    assert (done.was_there, done.written_pages) == (True, 0)
    assert held_bytes(node) == held


def test_one_pull_at_a_time_writes_into_a_directory(tmp_path: Path) -> None:
    with alone_in(tmp_path):
        with pytest.raises(WeightsError, match="another pull writes there"), alone_in(tmp_path):
            pytest.fail("two at once")
        (tmp_path / "other").mkdir()
        with alone_in(tmp_path / "other"):
            pass
    with pytest.raises(ZeroDivisionError), alone_in(tmp_path):
        raise ZeroDivisionError
    with alone_in(tmp_path):
        pass
    with pytest.raises(WeightsError, match="No such file"), alone_in(tmp_path / "gone"):
        pytest.fail("there is nothing to lock")


def test_a_lock_is_no_file_of_the_model_and_no_link_is_followed(
    store: WeightStore, model: Path, tmp_path: Path
) -> None:
    with alone_in(model):
        push(store, model, BASE)
    assert LOCK not in {file.path for file in store.manifest(BASE).files}
    (tmp_path / LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WeightsError), alone_in(tmp_path):
        pytest.fail("a link leads elsewhere")
    assert not (tmp_path / "elsewhere").exists()


def test_a_fine_tune_shares_the_tensors_that_it_left_alone(
    store: WeightStore, model: Path, tmp_path: Path
) -> None:
    """Also where its header is longer, so that no byte is where it was."""
    push(store, model, BASE)
    tuned = {**TENSORS, "layer.1.large": bytes(MIB), "a.new.one": b"x" * 5000}
    done = push(store, write_model(tmp_path / "tuned", tuned, notes="n" * 4321), TUNED)
    assert done.written_bytes < 2 * MIB < 15 * MIB < done.manifest.size_bytes
    assert read_tensors(store, TUNED) == tuned
    assert read_tensors(store, BASE) == TENSORS
    own = {str(entry.model): entry.own_bytes for entry in catalog.entries(store)}
    assert 0 < own["demo@2"] < 2 * MIB


def test_removing_a_revision_frees_what_no_other_one_has(
    store: WeightStore, model: Path, tmp_path: Path, node: LocalNode
) -> None:
    empty = held_bytes(node)
    push(store, model, BASE)
    with_base = held_bytes(node)
    push(store, write_model(tmp_path / "tuned", {**TENSORS, "layer.1.large": bytes(MIB)}), TUNED)
    removed = catalog.remove(store, TUNED)
    assert (removed.pages > 0, removed.problem) == (True, "")
    assert held_bytes(node) == with_base
    assert read_tensors(store, BASE) == TENSORS
    with pytest.raises(WeightsError, match=r"no model demo@2.*there are: demo@1"):
        store.manifest(TUNED)
    catalog.remove(store, BASE)
    assert held_bytes(node) == empty
    assert (states(store), store.revisions()) == ({}, [])
    with pytest.raises(WeightsError, match="no model demo@1"):
        catalog.remove(store, BASE)


def test_a_removed_revision_can_be_pushed_with_other_files(
    store: WeightStore, model: Path, tmp_path: Path
) -> None:
    push(store, model, BASE)
    other = write_model(tmp_path / "other", tensors_of(2 * MIB, seed=50))
    with pytest.raises(WeightsError, match=r"demo@1 is in the pool with other files.*never changes"):
        push(store, other, BASE)
    assert read_tensors(store, BASE) == TENSORS
    catalog.remove(store, BASE)
    push(store, other, BASE)
    assert read_tensors(store, BASE) == tensors_of(2 * MIB, seed=50)


# --- interrupted, at once


class Stopped(Exception):
    pass


def stop_after(count: int) -> Callable[[int, int], None]:
    calls = iter(range(count))

    def progress(done: int, size: int) -> None:
        if next(calls, None) is None:
            raise Stopped

    return progress


def test_an_interrupted_push_leaves_nothing_that_looks_whole(store: WeightStore, model: Path) -> None:
    """At each of its steps."""
    for steps in range(0, 60, 7):
        try:
            push(store, model, BASE, progress=stop_after(steps))
        except Stopped:
            assert states(store) in ({}, {"demo@1": "push not finished"})
            with pytest.raises(WeightsError, match="demo@1"):
                store.manifest(BASE)
        else:
            break
    else:
        raise AssertionError("the push has more steps")
    assert states(store) == {"demo@1": "whole"}
    assert read_tensors(store, BASE) == TENSORS


def test_what_a_given_up_push_left_is_freed(
    store: WeightStore, model: Path, node: LocalNode, monkeypatch: Any
) -> None:
    empty = held_bytes(node)
    monkeypatch.setattr(pushing, "BATCH_BYTES", 1)
    with pytest.raises(Stopped):
        push(store, model, BASE, progress=stop_after(30))
    assert held_bytes(node) > empty
    catalog.remove(store, BASE)
    assert held_bytes(node) == empty


def test_prune_frees_pages_that_nobody_names_and_no_others(
    store: WeightStore, model: Path, node: LocalNode
) -> None:
    push(store, model, BASE)
    held = held_bytes(node)
    page = np.zeros(PAGE_BYTES, np.uint8)
    assert store.content.put([b"x" * 32], [[page]]) == [True]
    removed = catalog.prune(store)
    assert (removed.pages, removed.problem) == (1, "")
    assert held_bytes(node) == held
    assert states(store) == {"demo@1": "whole"}


@pytest.mark.parametrize("others", [TENSORS, tensors_of(2 * MIB, seed=50)], ids=["same files", "other files"])
def test_of_pushes_at_once_that_differ_one_is_refused(
    node: LocalNode, model: Path, store: WeightStore, tmp_path: Path, others: dict[str, bytes]
) -> None:
    other = write_model(tmp_path / "other", others)
    errors = at_once(node, [(model, BASE), (other, BASE)])
    assert len(errors) == (others is not TENSORS)
    assert all("with other files" in one or "from other files" in one for one in errors)
    assert states(store) == {"demo@1": "whole"}
    assert read_tensors(store, BASE) in (TENSORS, others)


def at_once(node: LocalNode, pushes: list[tuple[Path, ModelName]]) -> list[str]:
    """What went wrong."""
    errors: list[str] = []
    gate = threading.Barrier(len(pushes))

    def run(directory: Path, model: ModelName) -> None:
        with store_of(node) as own:
            gate.wait(SOON_S)
            try:
                push(own, directory, model)
            except (WeightsError, PoolError) as error:
                errors.append(str(error))

    threads = [threading.Thread(target=run, args=each) for each in pushes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
        assert not thread.is_alive()
    return errors


def test_a_file_that_changes_while_it_is_pushed_is_refused(store: WeightStore, model: Path) -> None:
    weights = model / "model.safetensors"
    data = weights.read_bytes()

    def change(done: int, size: int) -> None:
        if done == size:
            weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    with pytest.raises(WeightsError, match=r"model\.safetensors changes while it is pushed"):
        push(store, model, BASE, progress=change)
    with pytest.raises(WeightsError, match="demo@1 is not whole"):
        store.manifest(BASE)


def test_a_revision_removed_while_it_is_pushed_does_not_come_back_whole(
    node: LocalNode, store: WeightStore, model: Path
) -> None:
    removed: list[object] = []

    def remove(done: int, size: int) -> None:
        if not removed and states(store):
            removed.append(catalog.remove(store, BASE))

    with store_of(node) as own, pytest.raises(WeightsError, match="was removed while it was pushed"):
        push(own, model, BASE, progress=remove)
    with pytest.raises(WeightsError):
        store.manifest(BASE)


# --- reading


def damage(node: LocalNode, store: WeightStore, path: str, place: int) -> None:
    """Flip a bit of a page of the model's file, behind the node's back."""
    file = store.manifest(BASE).find(path)
    assert file is not None
    state = node.node.state
    number = next(space.number for space in state.namespaces if space.name == store.namespace)
    slot = state.store.find(number, file.pieces[place].key)
    arena = np.memmap(node.arena_path, dtype=np.uint8, mode="r+")
    arena[state.store.slots.offset(slot) + 5] ^= 1


@pytest.mark.parametrize(
    ("path", "place"),
    [("model.safetensors", -1), extended("model.safetensors", 0), extended("tokenizer.json", 0)],
)
def test_a_damaged_page_is_named_and_never_given_out(
    store: WeightStore, model: Path, node: LocalNode, path: str, place: int, tmp_path: Path
) -> None:
    push(store, model, BASE)
    damage(node, store, path, place)
    said = rf"demo@1: {path}: page [0-9a-f]{{16}} is damaged .*push demo@1 again"
    with pytest.raises(WeightsError, match=said):
        pull(store, BASE, tmp_path / "out")
    assert path not in files_in(tmp_path / "out")
    if path == "model.safetensors":
        with pytest.raises(WeightsError, match=rf"{path}: page [0-9a-f]{{16}} is (damaged|not in the pool)"):
            read_tensors(store, BASE)
    assert states(store) == {"demo@1": "1 pages lost: push it again"}
    assert push(store, model, BASE).written_pages == 1
    assert read_tensors(store, BASE) == TENSORS


def test_warming_reads_and_checks_every_page(store: WeightStore, model: Path, node: LocalNode) -> None:
    push(store, model, BASE)
    steps: list[tuple[int, int]] = []
    manifest = catalog.warm(store, BASE, lambda done, size: steps.append((done, size)))
    assert steps[-1] == (manifest.size_bytes, manifest.size_bytes)
    damage(node, store, "model.safetensors", 3)
    with pytest.raises(WeightsError, match="is damaged"):
        catalog.warm(store, BASE, lambda done, size: None)


def test_a_page_key_of_another_worker_is_refused_by_name(start: Start, model: Path) -> None:
    node = start(**{**ROOMY, "page_bytes": 8 << 20})
    with store_of(node, page_key="k" * 16) as keyed:
        push(keyed, model, BASE)
        assert read_tensors(keyed, BASE) == TENSORS
    with store_of(node) as plain, pytest.raises(PoolError, match="page_key"):
        plain.open()


# --- a full pool, eviction, lost nodes


def test_kv_pages_do_not_displace_weights_and_weights_beyond_the_memory_are_refused(
    start: Start, tmp_path: Path
) -> None:
    node = start(**{**ROOMY, "capacity_bytes": 40 << 20})
    with store_of(node) as store:
        push(store, write_model(tmp_path / "model", TENSORS), BASE)
        kv = PoolClient(pool_config(node), "kv", {})
        try:
            for size in (PAGE_BYTES, 100_000):  # of the weights' size class, and of another one
                for n in range(60):
                    kv.put([bytes([n, size % 251]) * 16], [[np.zeros(size, np.uint8)]])
        finally:
            kv.close()
        assert read_tensors(store, BASE) == TENSORS
        big = write_model(tmp_path / "big", tensors_of(60 * MIB, seed=9))
        with pytest.raises(WeightsError, match=r"demo@2 is not whole: .* were not stored: the pool is full"):
            push(store, big, TUNED)
        assert states(store) == {"demo@1": "whole", "demo@2": "push not finished"}
        assert read_tensors(store, BASE) == TENSORS
        catalog.remove(store, TUNED)
        assert read_tensors(store, BASE) == TENSORS
    node.node.state.check()


def test_weights_have_a_small_share_of_a_busy_node_and_keep_what_an_operator_set(
    store: WeightStore, model: Path, node: LocalNode
) -> None:
    push(store, model, BASE)
    settings = {one.name: one.settings for one in node.node.state.namespaces.registry}
    for name in ("weights", "weights/demo@1"):
        assert (settings[name].policy, settings[name].weight) == ("keep", 0.1)
    push(store, model, BASE, weight=0.5)
    push(store, model, BASE)
    settings = {one.name: one.settings for one in node.node.state.namespaces.registry}
    assert settings["weights"].weight == 0.5


def test_a_lost_node_is_an_error_that_says_what_to_push_and_a_push_writes_what_is_lacking(
    start: Start, tmp_path: Path, model: Path
) -> None:
    names = ("a", "b", "c")
    cluster = ClusterConfig(peers=[f"unix:{tmp_path}/a.sock"], **QUIET)
    nodes = [start(**ROOMY, name=name, cluster=cluster) for name in names]
    lost, config = nodes[1], nodes[1].config
    with store_of(lost) as by_lost:  # replicas of what it writes are with it
        push(by_lost, model, BASE)
        assert read_tensors(by_lost, BASE) == TENSORS
    with store_of(nodes[0], nodes[2]) as store:
        lost.kill()
        (config.arena_dir / config.name / "arena").unlink()
        (config.arena_dir / config.name / "table").unlink(missing_ok=True)
        with pytest.raises((WeightsError, PoolError), match=r"push it again|push demo@1 again|unix:"):
            read_tensors(store, BASE)
        lost.restart()
        assert push(store, model, BASE).written_pages > 0
        assert read_tensors(store, BASE) == TENSORS


def test_with_two_copies_a_lost_node_costs_nothing(start: Start, tmp_path: Path, model: Path) -> None:
    """Its memory is gone for good. What the others hold becomes theirs, and is copied once more."""
    names = ("a", "b", "c")
    cluster = ClusterConfig(peers=[f"unix:{tmp_path}/a.sock"])
    nodes = [start(**ROOMY, name=name, cluster=cluster) for name in names]
    with store_of(*nodes) as store:
        push(store, model, BASE, copies=2)
        settings = {one.name: one.settings for one in nodes[0].node.state.namespaces.registry}
        assert (settings["weights"].copies, settings["weights/demo@1"].copies) == (2, 2)
        until(lambda: _is_twice(nodes))
        lost, *left = sorted(nodes, key=held_bytes, reverse=True)
        lost.kill()
        until(lambda: all(len(node.node.gossip.view.nodes) == 2 for node in left))
        assert read_tensors(store, BASE) == TENSORS
        assert states(store) == {"demo@1": "whole"}
        until(lambda: _is_twice(left))
        catalog.remove(store, BASE)
        until(lambda: not _held(left))


def _held(nodes: list[LocalNode]) -> Counter[tuple[str, bytes]]:
    """On how many of these nodes each page of weights is."""
    found: Counter[tuple[str, bytes]] = Counter()
    for node in nodes:
        state = node.node.state
        for space in [space for space in state.namespaces if space.name.startswith("weights")]:
            found.update((space.name, key) for key in state.store.index.namespace(space.number).committed)
    return found


def _is_twice(nodes: list[LocalNode]) -> bool:
    return min(_held(nodes).values()) >= 2
