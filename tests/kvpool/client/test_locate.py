"""A worker looks the pool up in a real etcd."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.discovery.config import EtcdConfig
from pdserve.errors import StartupError
from pdserve.kvpool.client import locate
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.client.locate import locate_pool
from tests.support.kvpool.clustered import running
from tests.support.kvpool.etcd_server import EtcdServer, in_etcd, settings


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path)
    yield server
    server.kill()


async def test_a_worker_finds_the_nodes_and_passes_no_password_on(tmp_path: Path, etcd: EtcdServer) -> None:
    async with running(tmp_path, "a", **in_etcd(etcd)) as a:
        config = PoolClientConfig(etcd=settings(etcd), token="t")
        found = await asyncio.to_thread(locate_pool, config)
        assert found.nodes == [PoolNodeRef(node="a", address=a.config.address, weight=1)]
        assert found.token == "t"
        assert found.etcd == EtcdConfig()


def test_a_worker_waits_for_the_first_node_and_gives_up_in_words(
    etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locate, "ETCD_WAIT_S", 0.3)
    slept: list[float] = []
    config = PoolClientConfig(etcd=settings(etcd), cluster="mine")
    with pytest.raises(StartupError, match="no node of the pool 'mine'"):
        locate_pool(config, sleep=slept.append)
    assert slept
    etcd.kill()
    with pytest.raises(StartupError, match="cannot be asked"):
        locate_pool(config, sleep=slept.append)


def test_nodes_in_the_configuration_win() -> None:
    nodes = [PoolNodeRef(node="n", address="unix:/n")]
    config = PoolClientConfig(nodes=nodes, etcd=EtcdConfig(endpoints=["http://127.0.0.1:1"]))
    assert locate_pool(config).nodes == nodes
