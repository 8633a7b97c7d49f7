"""The client that a worker's HTTP process has of a store without waits, over a store in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import numpy as np

from pdserve.errors import PoolError
from pdserve.kvpool.client.async_client import Place
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.mover.polled_client import LAST_POLL_S, THREADS, PolledClient
from pdserve.kvpool.stores.client import StoreClient
from tests.support.kvpool.clients import SOON_S
from tests.support.kvpool.page_stores import GEOMETRY, MemoryServer

CONFIG = PoolClientConfig(engine="memory", retry_after_s=0.01)
ONE, TWO = (number.to_bytes(32, "big") for number in (1, 2))


class Rig:
    """A server, a writer, and a client in a running event loop."""

    def __init__(self, config: PoolClientConfig = CONFIG) -> None:
        self.server = MemoryServer()
        self.calls: list[str] = []
        self.server.before = self.calls.append
        self.writer = StoreClient(config, "ns", GEOMETRY, self.server.store)
        self.client = PolledClient(config, "ns", GEOMETRY, self.open_store)

    def open_store(self, config: PoolClientConfig, namespace: str, geometry: dict[str, str]) -> StoreClient:
        return StoreClient(config, namespace, geometry, self.server.store)

    def write(self, key: bytes) -> None:
        assert self.writer.put([key], [[np.zeros(8, np.uint8)]]) == [True]

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def main() -> Any:
            try:
                return await asyncio.wait_for(work, SOON_S)
            finally:
                self.client.close()

        return asyncio.run(main())


def test_a_wait_ends_when_the_last_page_is_there() -> None:
    rig = Rig()
    asked_often = threading.Event()

    def note(call: str) -> None:
        rig.calls.append(call)
        if rig.calls.count("exists") == 3:
            asked_often.set()

    rig.server.before = note

    async def work() -> None:
        waiting = asyncio.create_task(rig.client.wait([ONE, TWO], SOON_S))
        rig.write(ONE)
        assert await asyncio.to_thread(asked_often.wait, SOON_S)
        assert not waiting.done()
        rig.write(TWO)
        assert await waiting == [True, True]

    rig.run(work())


def test_a_wait_ends_with_its_time() -> None:
    rig = Rig()

    async def work() -> None:
        rig.write(ONE)
        assert await rig.client.wait([ONE, TWO], 2 * LAST_POLL_S) == [True, False]
        assert await rig.client.wait([], 1.0) == []

    rig.run(work())
    assert rig.calls.count("exists") > 1


def test_a_store_that_is_down_is_not_waited_for() -> None:
    rig = Rig()
    rig.server.is_down = True

    async def work() -> None:
        assert await rig.client.wait([ONE], 10 * SOON_S) == [False]
        assert await rig.client.exists([ONE]) == [False]
        [error] = (await rig.client.check()).values()
        assert isinstance(error, PoolError)

    rig.run(work())


def test_a_call_that_hangs_is_a_miss_in_time_and_holds_up_a_bounded_number_of_threads() -> None:
    rig = Rig(PoolClientConfig(engine="memory", exists_timeout_s=0.05, connect_timeout_s=0.05))
    hanging, entered = threading.Event(), threading.Semaphore(0)

    def hang(call: str) -> None:
        entered.release()
        hanging.wait(SOON_S)

    rig.server.before = hang

    async def work() -> None:
        asked = [rig.client.exists([ONE]) for _ in range(3 * THREADS)]
        assert await asyncio.gather(*asked) == [[False]] * (3 * THREADS)
        assert isinstance((await rig.client.check())["memory"], PoolError)
        assert await rig.client.wait([ONE], 0.1) == [False]
        hanging.set()

    try:
        rig.run(work())
    finally:
        hanging.set()
    assert sum(entered.acquire(blocking=False) for _ in range(100)) <= 2 * THREADS  # and those of the close


def test_what_the_store_cannot_tell_is_left_open() -> None:
    rig = Rig()

    async def work() -> None:
        rig.write(ONE)
        assert await rig.client.places([ONE, TWO]) == [Place("memory", "memory"), None]
        assert await rig.client.fates([ONE]) == [None]
        assert await rig.client.keep([ONE], 60.0) == 0
        assert await rig.client.check() == {"memory": None}

    rig.run(work())


def test_another_namespace_is_asked_once_weights_were_replaced() -> None:
    rig = Rig()

    async def work() -> None:
        rig.write(ONE)
        assert await rig.client.exists([ONE]) == [True]
        rig.client.use("other", GEOMETRY)
        assert (rig.client.namespace, await rig.client.exists([ONE])) == ("other", [False])

    rig.run(work())


def test_a_closed_client_answers_with_misses() -> None:
    rig = Rig()

    async def work() -> None:
        rig.write(ONE)
        rig.client.close()
        assert await rig.client.exists([ONE]) == await rig.client.wait([ONE], SOON_S) == [False]

    rig.run(work())
