"""What both pool clients promise, the synchronous and the asyncio one, over a real node process.

Nodes that die, hang up and are upgraded at any moment: tests/kvpool/client/test_client_model.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import pytest

from pdserve.errors import PoolError, PoolRefused
from pdserve.kvpool.client import async_client as async_client_module
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from tests.support.kvpool.clients import SOON_S, Blocking, until
from tests.support.kvpool.pools import KIB, ProcessPool, arena_dir, remove_arena, remove_arena_dir

PAGE_BYTES = 16 * KIB


class Client(Protocol):
    """Either client, called from an ordinary thread."""

    def exists(self, keys: Sequence[bytes]) -> list[bool]: ...
    def check(self) -> dict[str, PoolError | None]: ...
    def close(self) -> None: ...


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    config = PoolNodeConfig(
        name="contract",
        arena_dir=arena_dir(),
        capacity_bytes="16MiB",
        max_client_share=1.0,
    )
    pool = ProcessPool(config, tmp_path_factory.mktemp("clients"), "shm")
    yield pool
    pool.resume()
    pool.kill()
    remove_arena(config)
    remove_arena_dir()


@pytest.fixture
def client(kind: str, node: ProcessPool, request: pytest.FixtureRequest) -> Iterator[Client]:
    made = client_of(kind, node, request.node.name)
    yield made
    made.close()


@pytest.fixture
def writer(node: ProcessPool, request: pytest.FixtureRequest) -> Iterator[PoolClient]:
    made = client_of("sync", node, request.node.name)
    assert isinstance(made, PoolClient)
    yield made
    made.close()


def client_of(kind: str, node: ProcessPool, namespace: str, page_size: str = "64", **options: Any) -> Client:
    refs = [PoolNodeRef(node="contract", address=node.address)]
    config = PoolClientConfig(nodes=refs, **{"retry_after_s": 0.05, **options})
    geometry = {"page_size": page_size}
    return (
        PoolClient(config, namespace, geometry) if kind == "sync" else Blocking(config, namespace, geometry)
    )


def keys(*numbers: int) -> list[bytes]:
    return [n.to_bytes(32, "big") for n in numbers]


def pages(*numbers: int) -> list[list[Bytes1D]]:
    return [[np.full(PAGE_BYTES, n, np.uint8)] for n in numbers]


def test_what_was_put_is_there_and_has_its_bytes(client: Client, writer: PoolClient, kind: str) -> None:
    assert client.exists(keys(1, 2)) == [False, False]
    assert writer.put(keys(1, 2), pages(1, 2)) == [True, True]
    assert writer.put(keys(2, 3), pages(2, 3)) == [True, True]
    assert client.exists(keys(3, 4, 1)) == [True, False, True]
    read = pages(0, 0, 0, 0)
    assert writer.get(keys(1, 4, 2, 3), read) == [True, False, True, True]
    assert [int(page[0][-1]) for page in read] == [1, 0, 2, 3]
    assert writer.get([], []) == client.exists([]) == writer.put([], []) == []
    assert writer.clear() == 3
    assert client.exists(keys(1, 2, 3)) == [False] * 3


@pytest.mark.parametrize("kind", ["async"])
def test_a_wait_ends_with_the_page_or_the_time_and_outlasts_its_slices(
    client: Client, writer: PoolClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(client, Blocking)
    monkeypatch.setattr(async_client_module, "WAIT_SLICE_S", 0.05)
    started_s = time.monotonic()
    assert client.wait(keys(1), 0.12) == [False]
    assert time.monotonic() - started_s >= 0.12
    until(lambda: writer.status()["contract"].waiters == 0)  # a wait that is over is forgotten by the node
    found: list[list[bool]] = []
    waiter = threading.Thread(target=lambda: found.append(client.wait(keys(1, 2), SOON_S)))
    waiter.start()
    for _ in range(3):  # slices
        until(lambda: writer.status()["contract"].waiters > 0)
        until(lambda: writer.status()["contract"].waiters == 0)
    writer.put(keys(1), pages(1))
    assert found == []
    writer.put(keys(2), pages(2))
    waiter.join(SOON_S)
    assert found == [[True, True]]


def test_check_says_what_is_wrong_with_a_node_that_refuses_or_hangs(
    kind: str, node: ProcessPool, request: pytest.FixtureRequest
) -> None:
    client = client_of(kind, node, request.node.name, connect_timeout_s=0.3)
    assert client.check() == {"contract": None}
    stranger = client_of(kind, node, request.node.name, page_size="32")
    assert isinstance(stranger.check()["contract"], PoolRefused)
    stranger.close()
    node.pause()
    assert isinstance(client.check()["contract"], PoolError)
    node.resume()
    until(lambda: client.check() == {"contract": None})
    client.close()


def test_a_node_that_was_killed_and_started_again_is_found_and_lost_nothing(
    client: Client, writer: PoolClient, node: ProcessPool
) -> None:
    writer.put(keys(1), pages(1))
    assert client.exists(keys(1)) == [True]
    node.kill()
    node.restart()
    assert client.exists(keys(1)) == [True]  # the connection that it left here is no failure
    assert writer.get(keys(1), pages(0)) == [True]
    node.kill()
    for _ in range(3):
        assert (
            client.exists(keys(1))
            == writer.get(keys(1), pages(0))
            == writer.put(keys(9), pages(9))
            == [False]
        )
    node.restart()
    until(lambda: client.exists(keys(1)) == [True])
    until(lambda: writer.get(keys(1), pages(0)) == [True])


def test_a_closed_client_answers_with_misses(client: Client) -> None:
    client.shut() if isinstance(client, Blocking) else client.close()
    assert client.exists(keys(1)) == [False]
