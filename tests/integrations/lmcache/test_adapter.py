"""LMCache's L2 interface on a real node: the contract that LMCache's controllers rely on."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.errors import ConfigError
from pdserve.kvpool.client.client import PoolClient
from tests.support.integrations.lmcache import (
    IS_REAL,
    Open,
    contents,
    importable,
    key,
    layout,
    memory_object,
)
from tests.support.kvpool.local_node import LocalNode
from tests.support.waiting import until

real_only = pytest.mark.skipif(not IS_REAL, reason="LMCache is missing (docs/other-engines.md)")


def test_objects_of_one_server_are_found_and_loaded_by_another(open_adapter: Open) -> None:
    keys = [key(number) for number in range(20)]
    objects = [memory_object(number) for number in range(20)]
    stored = open_adapter().store(keys, objects)
    assert stored.is_successful()
    assert stored.bytes_transferred() == sum(one.get_size() for one in objects)
    other = open_adapter()
    assert other.look_up([*keys, key(99)]) == [True] * 20 + [False]
    loaded = [memory_object() for _ in keys]
    assert other.load(keys, loaded) == [True] * 20
    assert list(map(contents, loaded)) == list(map(contents, objects))
    other.adapter.submit_unlock(keys)
    assert other.look_up(keys[:1]) == [True]


def test_what_is_missing_leaves_its_object_out(open_adapter: Open) -> None:
    server = open_adapter()
    server.store([key(1), key(3)], [memory_object(1), memory_object(3)])
    assert server.look_up([key(n) for n in range(4)]) == [False, True, False, True]
    loaded = [memory_object() for _ in range(4)]
    assert server.load([key(n) for n in range(4)], loaded) == [False, True, False, True]
    assert contents(loaded[3]) == contents(memory_object(3))


def test_the_three_descriptors_differ_and_stay_silent_without_tasks(open_adapter: Open) -> None:
    adapter = open_adapter().adapter
    fds = {adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()}
    assert len(fds) == 3
    assert adapter.query_load_result(1) is None
    assert adapter.query_lookup_and_lock_result(1) is None
    assert adapter.pop_completed_store_tasks() == {}


@pytest.mark.parametrize(
    "other",
    [{"salt": "acme"}, {"rank": 1, "ranks": 2}, {"group": 1}, {"model": "org/another"}],
    ids=lambda one: next(iter(one)),
)
def test_objects_of_other_names_are_never_found(open_adapter: Open, other: dict[str, Any]) -> None:
    server = open_adapter()
    server.store([key(1)], [memory_object(1)])
    descs = {group: layout() for group in (0, 1)}
    assert server.look_up([key(1), key(1, **other)], descs) == [True, False]
    assert server.load([key(1, **other)], [memory_object()]) == [False]


def test_ranks_of_one_model_share_a_namespace_and_not_their_objects(open_adapter: Open) -> None:
    server = open_adapter()
    ranks = [key(1, rank=rank, ranks=2) for rank in (0, 1)]
    server.store(ranks, [memory_object(10), memory_object(11)])
    loaded = [memory_object(), memory_object()]
    assert server.load(ranks, loaded) == [True, True]
    assert [contents(one) for one in loaded] == [contents(memory_object(10)), contents(memory_object(11))]
    assert len(server.adapter.report_status()["namespaces"]) == 1


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.bfloat16, (2, 3, 16, 64)), (torch.float16, (2, 3, 64, 16)), (torch.float16, (2, 3, 8, 64))],
)
def test_objects_of_another_type_or_shape_are_never_found(
    open_adapter: Open, dtype: torch.dtype, shape: Any
) -> None:
    """Also where they have as many bytes: they would be taken for other numbers."""
    server = open_adapter()
    server.store([key(1)], [memory_object(1)])
    assert server.look_up([key(1)], {0: layout(dtype, shape)}) == [False]
    assert server.load([key(1)], [memory_object(dtype=dtype, shape=shape)]) == [False]


def test_a_look_up_without_layouts_finds_what_this_server_has_met(open_adapter: Open) -> None:
    """LMCache's own check of adapters asks so."""
    server = open_adapter()
    server.store([key(1)], [memory_object(1)])
    assert server.look_up([key(1), key(2)], {}) == [True, False]


def test_another_revision_is_another_model(open_adapter: Open) -> None:
    open_adapter(revision="r1").store([key(1)], [memory_object(1)])
    assert open_adapter(revision="r2").look_up([key(1)]) == [False]
    assert open_adapter(revision="r1").look_up([key(1)]) == [True]


def test_a_models_directory_is_known_by_its_files_wherever_it_lies(
    open_adapter: Open, tmp_path: Path
) -> None:
    def model_at(place: str, weights: bytes) -> str:
        directory = tmp_path / place / "m"
        directory.mkdir(parents=True)
        (directory / "config.json").write_text('{"a": 1}')
        (directory / "model.bin").write_bytes(weights)
        return str(directory)

    first, same, other = model_at("a", b"w" * 99), model_at("b", b"w" * 99), model_at("c", b"v" * 99)
    open_adapter().store([key(1, model=first)], [memory_object(1)])
    server = open_adapter()
    assert [server.look_up([key(1, model=model)]) for model in (same, other)] == [[True], [False]]


def test_a_namespace_of_the_operator_refuses_what_does_not_fit(
    open_adapter: Open, caplog: pytest.LogCaptureFixture
) -> None:
    open_adapter(pool={"namespace": "mine"}).store([key(1)], [memory_object(1)])
    server = open_adapter(pool={"namespace": "mine"}, revision="r2")
    assert server.look_up([key(1)]) == [False]
    assert "revision" in caplog.text


def test_a_pool_that_is_away_costs_misses_and_is_taken_again(open_adapter: Open, node: LocalNode) -> None:
    server = open_adapter(pool={"restart_wait_s": 0.0})
    server.store([key(1)], [memory_object(1)])
    node.kill()
    assert server.look_up([key(1)]) == [False]
    assert server.load([key(1)], [memory_object()]) == [False]
    assert not server.store([key(2)], [memory_object(2)]).is_successful()
    assert not server.adapter.report_status()["is_healthy"]
    node.restart()
    until(lambda: server.look_up([key(1)]) == [True])  # the node kept its memory
    assert server.store([key(2)], [memory_object(2)]).is_successful()
    assert server.adapter.report_status()["is_healthy"]


def test_a_pool_that_was_never_there_costs_misses(open_adapter: Open, tmp_path: Path) -> None:
    absent = [{"node": "n", "address": f"unix:{tmp_path}/nobody.sock"}]
    server = open_adapter(pool={"nodes": absent})
    assert server.look_up([key(1)]) == [False]
    assert not server.store([key(1)], [memory_object(1)]).is_successful()


def test_wrong_bytes_in_the_pool_are_a_miss(open_adapter: Open, node: LocalNode) -> None:
    server = open_adapter()
    data = memory_object(1)
    server.store([key(1)], [data])
    arena = bytearray(node.arena_path.read_bytes())
    at = arena.find(contents(data)[:64])
    assert at >= 0
    with node.arena_path.open("r+b") as file:
        file.seek(at + 5)
        file.write(bytes([arena[at + 5] ^ 1]))
    assert server.load([key(1)], [memory_object()]) == [False]
    assert server.look_up([key(1)]) == [False]  # the pool has dropped it
    [counters] = server.adapter.report_status()["namespaces"].values()
    assert counters["pages_corrupt"] == 1


def test_a_bug_costs_the_task_and_not_the_lane(open_adapter: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    server = open_adapter()
    server.store([key(1)], [memory_object(1)])

    def failing(*given: Any) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(PoolClient, "exists", failing)
        assert server.look_up([key(1)]) == [False]
    assert server.look_up([key(1)]) == [True]


def test_after_close_nothing_touches_lmcaches_memory(
    open_adapter: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = open_adapter()
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(self: PoolClient, keys: Any, pages: Any) -> list[bool]:
        begun.set()
        assert go_on.wait(20)
        ended.set()
        return [False] * len(keys)

    monkeypatch.setattr(PoolClient, "get", slow)
    server.adapter.submit_load_task([key(1)], [memory_object()])
    assert begun.wait(20)
    closing = threading.Thread(target=server.adapter.close)
    closing.start()
    go_on.set()
    closing.join(20)
    assert ended.is_set()
    assert not closing.is_alive()
    server.adapter.close()  # idempotent


def test_objects_are_dropped_by_name(open_adapter: Open) -> None:
    server = open_adapter()
    keys = [key(number) for number in range(3)]
    server.store(keys, [memory_object(number) for number in range(3)])
    server.adapter.delete([keys[0], keys[2], key(99)])
    assert server.look_up(keys) == [False, True, False]
    assert server.adapter.get_usage().bytes_by_cache_salt[""] == memory_object().get_size()


def test_keys_cannot_be_listed(open_adapter: Open) -> None:
    with pytest.raises(NotImplementedError, match="pdserve pool ls"):
        open_adapter().adapter.list_l2_keys()


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({}, "pool"),
        ({"pool": {}}, "give pool.nodes or pool.etcd"),
        ({"pool": {}, "revison": "x"}, "unknown key 'revison' (did you mean 'revision'?)"),
    ],
)
def test_wrong_parameters_are_said_at_the_start(params: dict[str, Any], says: str) -> None:
    with importable():
        adapter = importlib.import_module("pdserve.integrations.lmcache").PdserveL2
        with pytest.raises(ConfigError, match="adapter_params") as caught:
            adapter(params)
    assert says in str(caught.value)


@real_only
def test_lmcache_itself_builds_it_from_its_command_line(node: LocalNode) -> None:
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig

    params = {"pool": {"nodes": [{"node": node.config.name, "address": node.address}]}}
    given = {
        "module_path": "pdserve.integrations.lmcache",
        "class_name": "PdserveL2",
        "adapter_params": params,
    }
    adapter = create_l2_adapter(PluginL2AdapterConfig.from_dict(given))
    assert adapter.report_status()["type"] == "pdserve"
    adapter.close()
