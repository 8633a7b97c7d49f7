"""What both pool clients promise, the synchronous and the asyncio one, over a real node process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import pytest

from pdserve.errors import PoolError, PoolRefused
from pdserve.kvpool.client.async_client import AsyncPoolClient
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers
from tests.support.kvpool.pools import KIB, ProcessPool, arena_dir, remove_arena

PAGE_BYTES = 16 * KIB
SOON_S = 30.0


class Client(Protocol):
    """Either client, called from an ordinary thread."""

    def exists(self, keys: Sequence[bytes]) -> list[bool]: ...
    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> list[bool]: ...
    def put(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> list[bool]: ...
    def wait(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]: ...
    def clear(self) -> int: ...
    def check(self) -> dict[str, PoolError | None]: ...
    def status(self) -> dict[str, m.StatusReport]: ...
    def close(self) -> None: ...


class Blocking:
    """The asyncio client, its loop in a thread."""

    def __init__(self, config: PoolClientConfig, namespace: str, geometry: dict[str, str]) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

        async def make() -> AsyncPoolClient:
            return AsyncPoolClient(config, namespace, geometry)

        self.inner = self.run(make())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *given: self.run(getattr(self.inner, name)(*given))

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.inner.close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)


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
        slab_bytes="1MiB",
        max_reserved_share=1.0,
        quarantine_s=0.2,
    )
    pool = ProcessPool(config, tmp_path_factory.mktemp("clients"), "shm")
    yield pool
    pool.resume()
    pool.kill()
    remove_arena(config)
    if arena_dir().exists():
        arena_dir().rmdir()


@pytest.fixture
def client(kind: str, node: ProcessPool, request: pytest.FixtureRequest) -> Iterator[Client]:
    made = client_of(kind, node, request.node.name)
    yield made
    made.close()


def client_of(kind: str, node: ProcessPool, namespace: str, **options: Any) -> Client:
    refs = [PoolNodeRef(node="contract", address=node.address)]
    config = PoolClientConfig(nodes=refs, **{"retry_after_s": 0.05, **options})
    make: Callable[..., Any] = PoolClient if kind == "sync" else Blocking
    made: Client = make(config, namespace, {"page_size": "64"})
    return made


def keys(*numbers: int) -> list[bytes]:
    return [n.to_bytes(32, "big") for n in numbers]


def pages(*numbers: int) -> list[list[Bytes1D]]:
    return [[np.full(PAGE_BYTES, n, np.uint8)] for n in numbers]


def empty(count: int) -> list[list[Bytes1D]]:
    return [[np.zeros(PAGE_BYTES, np.uint8)] for _ in range(count)]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # between looks at another process's work


def test_what_was_put_is_there_and_has_its_bytes(client: Client) -> None:
    assert client.exists(keys(1, 2)) == [False, False]
    assert client.put(keys(1, 2), pages(1, 2)) == [True, True]
    assert client.put(keys(2, 3), pages(2, 3)) == [True, True]
    assert client.exists(keys(3, 4, 1)) == [True, False, True]
    read = empty(4)
    assert client.get(keys(1, 4, 2, 3), read) == [True, False, True, True]
    assert [int(page[0][-1]) for page in read] == [1, 0, 2, 3]
    assert client.get([], []) == client.exists([]) == client.put([], []) == []


def test_clear_drops_the_namespace_s_pages_only(client: Client, kind: str, node: ProcessPool) -> None:
    other = client_of(kind, node, "neighbour " + kind)
    client.put(keys(1, 2), pages(1, 2))
    other.put(keys(1), pages(1))
    assert client.clear() == 2
    assert client.exists(keys(1, 2)) == [False, False]
    assert other.exists(keys(1)) == [True]
    other.close()


def test_a_wait_ends_with_the_page_or_the_time(client: Client, kind: str, node: ProcessPool) -> None:
    started_s = time.monotonic()
    assert client.wait(keys(1), 0.1) == [False]
    assert 0.1 <= time.monotonic() - started_s < 0.1 + 1.0 + 1.0
    found: list[list[bool]] = []
    waiter = threading.Thread(target=lambda: found.append(client.wait(keys(1, 2), SOON_S)))
    waiter.start()
    until(lambda: client.status()["contract"].waiters > 0)
    client.put(keys(1), pages(1))
    time.sleep(1.2)  # longer than a slice of the wait
    assert found == []
    client.put(keys(2), pages(2))
    waiter.join(SOON_S)
    assert found == [[True, True]]


def test_a_wait_given_up_is_forgotten_by_the_node(client: Client) -> None:
    assert client.wait(keys(1), 0.05) == [False]
    until(lambda: client.status()["contract"].waiters == 0)


def test_check_asks_the_node_and_says_what_is_wrong(client: Client, kind: str, node: ProcessPool) -> None:
    assert client.check() == {"contract": None}
    wrong = client_of(kind, node, "differs " + kind)
    assert wrong.check() == {"contract": None}
    refs = [PoolNodeRef(node="contract", address=node.address)]
    make: Any = PoolClient if kind == "sync" else Blocking
    stranger = make(PoolClientConfig(nodes=refs), "differs " + kind, {"page_size": "32"})
    assert isinstance(stranger.check()["contract"], PoolRefused)
    stranger.close()
    wrong.close()


def test_check_sees_a_node_that_hangs_though_its_connection_is_open(
    kind: str, node: ProcessPool, request: pytest.FixtureRequest
) -> None:
    client = client_of(kind, node, request.node.name, connect_timeout_s=0.3)
    assert client.check() == {"contract": None}
    node.pause()
    assert isinstance(client.check()["contract"], PoolError)
    node.resume()
    until(lambda: client.check() == {"contract": None})
    client.close()


def test_a_node_that_was_killed_and_started_again_is_found_and_lost_nothing(
    client: Client, node: ProcessPool
) -> None:
    client.put(keys(1), pages(1))
    node.kill()
    node.restart()
    assert client.exists(keys(1)) == [True]  # the connection that it left here is no failure
    assert client.get(keys(1), empty(1)) == [True]
    node.kill()
    for _ in range(3):
        assert (
            client.exists(keys(1))
            == client.get(keys(1), empty(1))
            == client.put(keys(9), pages(9))
            == [False]
        )
    node.restart()
    until(lambda: client.exists(keys(1)) == [True])
    until(lambda: client.get(keys(1), empty(1)) == [True])


def test_a_node_that_hangs_costs_one_deadline_and_every_call_ends_in_time(
    kind: str, node: ProcessPool, request: pytest.FixtureRequest
) -> None:
    bounds = {f"{what}_timeout_s": 0.3 for what in ("connect", "exists", "get", "put")}
    client = client_of(kind, node, request.node.name, retry_after_s=30.0, **bounds)
    client.put(keys(1), pages(1))
    client.exists(keys(1))
    node.pause()
    started_s = time.monotonic()
    for _ in range(30):
        begun_s = time.monotonic()
        assert client.get(keys(1), empty(1)) == [False]
        assert client.exists(keys(1)) == [False]
        assert time.monotonic() - begun_s < 2 * (0.3 + 1.0)
    assert time.monotonic() - started_s < 10
    node.resume()
    client.close()


def test_a_closed_client_answers_with_misses(client: Client, kind: str) -> None:
    if kind == "async":
        client.loop.call_soon_threadsafe(client.inner.close)  # type: ignore[attr-defined]
    else:
        client.close()
    assert client.get(keys(1), empty(1)) == client.put(keys(1), pages(1)) == [False]
    assert client.exists(keys(1)) == client.wait(keys(1), 5.0) == [False]
