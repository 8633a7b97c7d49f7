"""What `StoreClient` adds to a store: laziness, pauses after failures, and a wall against foreign code."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest

from docs.examples.store import DirectoryStore
from pdserve.errors import ConfigError, PoolError, PoolRefused
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.stores import client as client_module
from pdserve.kvpool.stores import registry
from pdserve.kvpool.stores.base import StoreSettings
from pdserve.kvpool.stores.client import StoreClient, open_client, space_of
from pdserve.kvpool.stores.registry import check_engine, kind_of
from pdserve.settings import plugins
from tests.support.kvpool.page_stores import GEOMETRY, MemoryServer, MemoryStore

KEY = bytes(32)
PAGE = [np.zeros(8, np.uint8)]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(client_module, "time", made)
    return made


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example is installed."""
    point = EntryPoint("directory", "docs.examples.store:DirectoryStore", registry.GROUP)
    broken = EntryPoint("broken", "docs.examples.nowhere:Store", registry.GROUP)
    monkeypatch.setattr(plugins, "_found", lambda group, path: {"directory": point, "broken": broken})


def client_of(server: MemoryServer, **options: Any) -> StoreClient:
    return StoreClient(PoolClientConfig(engine="memory", **options), "ns", GEOMETRY, server.store)


def test_a_store_that_failed_is_left_alone_for_longer_each_time(clock: Clock) -> None:
    server = MemoryServer()
    calls: list[str] = []
    server.before = calls.append
    server.is_down = True
    client = client_of(server, retry_after_s=1.0)
    asked_s = []
    for _ in range(200):
        before = len(calls)
        assert client.exists([KEY]) == [False]
        if len(calls) > before:
            asked_s.append(clock.now_s)
        clock.now_s += 0.5
    pauses = [later - earlier for earlier, later in itertools.pairwise(asked_s)]
    assert pauses[:5] == [1.0, 2.0, 4.0, 8.0, 10.0]
    assert set(pauses[4:]) == {10.0}
    assert client.counters.failures == len(asked_s)
    server.is_down = False
    clock.now_s += 10.0
    assert client.exists([KEY]) == [False]
    assert client.check() == {"memory": None}


def test_a_slow_failure_is_followed_by_as_long_a_pause(clock: Clock) -> None:
    server, calls = MemoryServer(), []

    def slow(call: str) -> None:
        calls.append(call)
        clock.now_s += 5.0

    server.before, server.is_down = slow, True
    client = client_of(server, retry_after_s=0.5)
    for _ in range(10):
        client.exists([KEY])
        clock.now_s += 1.0
    assert len(calls) == 2


def test_a_check_that_finds_the_store_down_ends_no_pause(clock: Clock) -> None:
    server = MemoryServer()
    calls: list[str] = []
    server.before, server.is_down = calls.append, True
    client = client_of(server, retry_after_s=1.0)
    client.exists([KEY])
    clock.now_s += 1.0
    assert isinstance(client.check()["memory"], PoolError)
    clock.now_s += 1.0
    client.exists([KEY])
    assert calls == ["exists", "check"]


class OddStore(MemoryStore):
    """Breaks the contract."""

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        raise RuntimeError("no")

    def put(self, keys: Sequence[bytes], pages: Any) -> list[bool]:
        return [True] * (len(keys) + 1)


def test_a_store_that_breaks_the_contract_gives_misses(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    server = MemoryServer()
    config = PoolClientConfig(engine="odd", retry_after_s=1.0)
    client = StoreClient(config, "ns", GEOMETRY, lambda settings: OddStore(server, settings))
    assert client.exists([KEY]) == [False]
    assert "RuntimeError: no" in caplog.text
    clock.now_s += 2.0
    assert client.put([KEY], [PAGE]) == [False]


def test_a_store_whose_options_are_bad_refuses_to_serve() -> None:
    config = PoolClientConfig(engine="directory", options={"pth": "/x"})
    [error] = StoreClient(config, "ns", GEOMETRY, DirectoryStore).check().values()
    assert isinstance(error, PoolRefused)
    assert "pth" in str(error)


def test_the_namespace_at_a_store_names_the_geometry() -> None:
    assert space_of("ns", {"a": "1"}) == space_of("ns", {"a": "1"}) != space_of("ns", {"a": "2"})


@pytest.mark.usefixtures("stores")
def test_a_store_is_found_by_its_entry_point() -> None:
    assert kind_of("directory") is DirectoryStore
    with pytest.raises(ConfigError, match="no store 'ceph'; installed are: broken, directory, pdserve"):
        kind_of("ceph")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        kind_of("broken")
    assert isinstance(
        open_client(PoolClientConfig(engine="directory"), "ns", GEOMETRY, name="test"), StoreClient
    )
    assert isinstance(open_client(PoolClientConfig(), "ns", GEOMETRY, name="test"), PoolClient)


@pytest.mark.usefixtures("stores")
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"nodes": [PoolNodeRef(node="a", address="unix:/a")]}, "pool.nodes: only pool nodes know this"),
        ({"token": "x"}, "pool.token: "),
        ({"page_key": "x" * 32}, "pool.page_key: "),
        ({"compute_tokens_s": 1.0}, "pool.compute_tokens_s: "),
        ({"page_mover": False}, "pool.page_mover = false"),
    ],
)
def test_options_that_only_pool_nodes_know_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_engine(PoolClientConfig(engine="directory", **wrong))


@pytest.mark.usefixtures("stores")
def test_a_store_says_what_it_lacks() -> None:
    assert "checksums" in check_engine(PoolClientConfig(engine="directory", options={"path": "/p"}))


@pytest.mark.usefixtures("stores")
def test_bad_options_end_a_worker_at_its_start() -> None:
    with pytest.raises(ConfigError, match=r'pool\.options of pool\.engine = "directory": .*pth'):
        check_engine(PoolClientConfig(engine="directory", options={"pth": "/x"}))


def test_what_needs_pool_nodes_refuses_another_engine() -> None:
    with pytest.raises(ConfigError, match=r'pool\.engine = "mooncake"'):
        PoolClient(PoolClientConfig(engine="mooncake"), "ns", GEOMETRY)


def test_a_client_that_is_closed_while_the_store_is_down_stays_closed() -> None:
    server = MemoryServer()
    server.is_down = True
    client = client_of(server)
    client.exists([KEY])
    client.close()
    server.is_down = False
    [error] = client.check().values()
    assert isinstance(error, PoolError)
    assert StoreSettings("ns").memory == ()
