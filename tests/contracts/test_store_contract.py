"""What every store of pages promises (`pdserve/kvpool/stores/base.py`): pool nodes by their own client, a
store in this process, the example of docs/extending/store.md, and real Mooncake over TCP. To add one, give
its kind to `KINDS` in tests/support/kvpool/page_stores.py.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np
import pytest

from pdserve.errors import PageMismatch, PoolError
from pdserve.kvpool.mover.polled_client import PolledClient
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.kvpool.stores.client import PageClient, StoreClient
from tests.support.kvpool.clients import SOON_S, until
from tests.support.kvpool.page_stores import GEOMETRY, KINDS, Kind, StoreKind
from tests.support.kvpool.pools import KIB
from tests.support.mooncake import is_installed

K, V = 12 * KIB, 4 * KIB
NO_MOONCAKE = (
    "MOONCAKE IS NOT TESTED: install mooncake-transfer-engine-non-cuda (pip install '.[mooncake]') to test "
    'pool.engine = "mooncake"'
)


@pytest.fixture(params=KINDS, scope="module")
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kind]:
    if request.param == "mooncake" and not is_installed():
        pytest.skip(NO_MOONCAKE)
    made = KINDS[request.param](tmp_path_factory.mktemp(request.param))
    yield made
    made.close()


@pytest.fixture
def store(kind: Kind, request: pytest.FixtureRequest) -> Iterator[PageClient]:
    with closing(kind.client(request.node.name)) as client:
        yield client


def keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in numbers]


def pages(*fills: int) -> list[list[Bytes1D]]:
    """Of two segments, as keys and values."""
    return [[np.full(K, fill, np.uint8), np.full(V, fill + 100, np.uint8)] for fill in fills]


def fills(read: Sequence[Sequence[Bytes1D]], found: Sequence[bool]) -> list[int | None]:
    """What whole pages are filled with; None: not found. Fails for a page of mixed bytes."""
    filled: list[int | None] = []
    for page, there in zip(read, found, strict=True):
        first = int(page[0][0])
        assert not there or ((page[0] == first).all() and (page[1] == first + 100).all())
        filled.append(first if there else None)
    return filled


def test_what_was_put_is_there_and_has_its_bytes(store: PageClient) -> None:
    assert store.exists(keys(1, 2)) == [False, False]
    assert store.put(keys(1, 2), pages(11, 12)) == [True, True]
    until(lambda: store.exists(keys(2, 3, 1)) == [True, False, True])
    read = pages(0, 0, 0)
    assert fills(read, store.get(keys(1, 3, 2), read)) == [11, None, 12]


def test_nothing_is_asked_and_nothing_is_answered(store: PageClient) -> None:
    assert store.exists([]) == store.get([], []) == store.put([], []) == []


def test_a_page_that_is_put_again_is_stored_and_stays_as_it_was(store: PageClient) -> None:
    assert store.put(keys(1), pages(11)) == [True]
    assert store.put(keys(1, 2), pages(99, 12)) == [True, True]
    read = pages(0, 0)
    assert fills(read, store.get(keys(1, 2), read)) == [11, 12]


def test_another_client_finds_the_pages(kind: Kind, store: PageClient) -> None:
    store.put(keys(1), pages(11))
    with closing(kind.client(store.namespace)) as other:
        until(lambda: other.exists(keys(1)) == [True])
        read = pages(0)
        assert fills(read, other.get(keys(1), read)) == [11]


def test_a_wait_ends_with_the_commit_by_another_client(kind: Kind, store: PageClient) -> None:
    if not isinstance(kind, StoreKind):
        pytest.skip("tests/contracts/test_client_contract.py has the waits of pool nodes")

    async def work() -> None:
        waiter = PolledClient(store.config, store.namespace, GEOMETRY, lambda _, *space: kind.client(*space))
        try:
            waiting = asyncio.create_task(waiter.wait(keys(1, 2), SOON_S))
            assert await asyncio.to_thread(store.put, keys(1), pages(11)) == [True]
            assert await waiter.wait(keys(1, 2), 0.2) == [True, False]
            assert not waiting.done()
            assert await asyncio.to_thread(store.put, keys(2), pages(12)) == [True]
            assert await waiting == [True, True]
        finally:
            waiter.close()

    asyncio.run(work())


def test_a_page_of_another_length_is_not_there(store: PageClient) -> None:
    store.put(keys(1, 2), pages(11, 12))
    for length in (K, K + 2 * V):
        assert store.get(keys(1), [[np.zeros(length, np.uint8)]]) == [False]
    one_segment = [[np.zeros(K + V, np.uint8)]]
    assert store.get(keys(2), one_segment) == [True]
    assert bytes(one_segment[0][0]) == bytes([12]) * K + bytes([112]) * V


def test_buffers_that_are_no_pages_are_refused(store: PageClient) -> None:
    with pytest.raises(PageMismatch):
        store.get(keys(1, 2), pages(0))
    with pytest.raises(PageMismatch):
        store.put(keys(1, 2), [*pages(1), [np.zeros(K, np.uint8)]])


def test_namespaces_do_not_meet_and_are_dropped_one_by_one(kind: Kind, store: PageClient) -> None:
    store.put(keys(1, 2), pages(11, 12))
    # names that a pattern or a prefix could mix up
    with closing(kind.client(f"{store.namespace}.")) as other, closing(kind.client("x")) as third:
        assert other.exists(keys(1)) == third.exists(keys(1)) == [False]
        assert other.put(keys(1), pages(21)) == [True]
        dropped = 0

        def is_empty() -> bool:  # a store may leave what was used a moment ago
            nonlocal dropped
            dropped += store.clear()
            return dropped == 2

        until(is_empty)
        assert store.exists(keys(1, 2)) == [False, False]
        read = pages(0)
        assert fills(read, other.get(keys(1), read)) == [21]


def test_workers_of_another_geometry_find_no_page(kind: Kind, store: PageClient) -> None:
    store.put(keys(1), pages(11))
    with closing(kind.client(store.namespace, {"page_size": "32"})) as stranger:
        assert stranger.exists(keys(1)) == stranger.get(keys(1), pages(0)) == [False]


def test_threads_that_read_and_write_at_once_get_their_own_pages(store: PageClient) -> None:
    wrong: list[object] = []

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(20):
            chosen = dice.sample(range(40), 4)
            store.put(keys(*chosen), pages(*chosen))
            read = pages(0, 0, 0, 0)
            found = store.get(keys(*chosen), read)
            if not all(
                page in (None, number) for page, number in zip(fills(read, found), chosen, strict=True)
            ):
                wrong.append((chosen, fills(read, found)))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    everything = list(range(40))
    read = pages(*[0] * 40)
    assert sum(page is not None for page in fills(read, store.get(keys(*everything), read))) > 0


def test_pages_in_lent_memory_move_as_others_do(kind: Kind, request: pytest.FixtureRequest) -> None:
    if not isinstance(kind, StoreKind):
        pytest.skip("pool nodes are lent no memory")
    memory = np.zeros(8 * (K + V), np.uint8)
    kind.memory = [memory]
    lent = [[memory[at : at + K], memory[at + K : at + K + V]] for at in range(0, len(memory), K + V)]
    try:
        with closing(kind.client(request.node.name)) as store:
            for number, page in enumerate(lent[:4]):
                page[0][:], page[1][:] = number, number + 100
            assert store.put(keys(0, 1, 2, 3), lent[:4]) == [True] * 4
            found = store.get(keys(2, 9, 0), lent[4:7])
            assert fills(lent[4:7], found) == [2, None, 0]
            mixed = [lent[7], *pages(0)]
            assert fills(mixed, store.get(keys(3, 1), mixed)) == [3, 1]
    finally:
        kind.memory = []


def test_more_pages_than_there_is_room_for_are_lost_or_refused_and_never_wrong(
    kind: Kind, store: PageClient
) -> None:
    """80 MiB, in pages of 1 MiB; the stores with a limit have less."""
    big = 1024 * KIB

    def page(number: int) -> list[Bytes1D]:
        return [np.full(big, number, np.uint8)]

    for number in range(80):
        store.put(keys(number), [page(number)])
    for number in range(80):
        [buffer] = read = page(255)
        if store.get(keys(number), [read]) == [True]:
            assert (buffer == number).all()
    store.put(keys(200), [page(200)])  # it goes on
    assert isinstance(store.exists(keys(200))[0], bool)


def test_a_store_that_dies_gives_misses_and_is_used_again_when_it_is_back(
    kind: Kind, store: PageClient
) -> None:
    store.put(keys(1), pages(11))
    assert all(error is None for error in store.check().values())
    kind.kill()
    try:
        for _ in range(3):
            assert store.exists(keys(1)) == store.put(keys(2), pages(12)) == [False]
            assert store.get(keys(1), pages(0)) == [False]
        assert any(isinstance(error, PoolError) for error in store.check().values())
    finally:
        kind.restart()
    until(lambda: store.put(keys(3), pages(13)) == [True])
    read = pages(0, 0)
    until(lambda: store.get(keys(3), pages(0)) == [True])
    found = store.get(keys(3, 1), read)
    assert fills(read, found) == [13, 11 if kind.keeps else None]
    until(lambda: all(error is None for error in store.check().values()))


def test_a_store_that_is_absent_at_the_start_is_found_later(
    kind: Kind, request: pytest.FixtureRequest
) -> None:
    kind.kill()
    try:
        store = kind.client(request.node.name)
        assert store.exists(keys(1)) == [False]
    finally:
        kind.restart()
    with closing(store):
        until(lambda: store.put(keys(1), pages(11)) == [True])


def test_a_closed_client_answers_with_misses(store: PageClient) -> None:
    store.put(keys(1), pages(11))
    store.close()
    assert store.exists(keys(1)) == store.get(keys(1), pages(0)) == store.put(keys(2), pages(2)) == [False]
    assert any(isinstance(error, PoolError) for error in store.check().values())
    store.close()


def test_pages_are_counted(store: PageClient) -> None:
    store.put(keys(1), pages(11))
    store.get(keys(1, 2), pages(0, 0))
    counted = store.counters
    assert (counted.pages_written, counted.pages_read, counted.pages_missed) == (1, 1, 1)
    assert counted.bytes_read == counted.bytes_written == K + V
    if isinstance(store, StoreClient):
        assert store.expected_read_s(keys(1)) == 0.0
