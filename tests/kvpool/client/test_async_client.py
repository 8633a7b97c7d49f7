"""The asyncio client against a real node process: many waits on one connection, a node that stops or dies."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from pdserve.errors import PoolRefused
from pdserve.kvpool.client.async_client import AsyncPoolClient
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.frames import FrameBuffer, decode_request, encode_frame
from pdserve.kvpool.transports.base import Connection
from tests.support.kvpool.node_model import key
from tests.support.kvpool.pools import KIB, ProcessPool, arena_dir, remove_arena

PAGE_BYTES = 4 * KIB
MAX_WAITERS = 8
SOON_S = 20.0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ProcessPool]:
    config = PoolNodeConfig(
        name="node",
        arena_dir=arena_dir(),
        capacity_bytes="4MiB",
        slab_bytes="1MiB",
        min_slot_bytes="4KiB",
        max_reserved_share=1.0,
        max_waiters=MAX_WAITERS,
        quarantine_s=0.2,
    )
    pool = ProcessPool(config, tmp_path, "shm")
    yield pool
    pool.resume()
    pool.kill()
    remove_arena(config)
    if arena_dir().exists():
        arena_dir().rmdir()


def client_of(node: ProcessPool, **options: Any) -> AsyncPoolClient:
    refs = [PoolNodeRef(node="node", address=node.address)]
    settings = {"retry_after_s": 0.05, **options}
    return AsyncPoolClient(PoolClientConfig(nodes=refs, **settings), "ns", {"page_size": "64"})


def open_namespace(connection: Connection, name: str, **geometry: str) -> int:
    reply = connection.call(m.OpenNamespace(1, name, geometry), time.monotonic() + SOON_S)
    assert isinstance(reply, m.Opened)
    return reply.namespace


def put(node: ProcessPool, *numbers: int) -> None:
    """Commit pages in "ns" from another connection."""
    connection = node.connect()
    until = time.monotonic() + SOON_S
    namespace = open_namespace(connection, "ns", page_size="64")
    request = m.Reserve(2, namespace, [key(n) for n in numbers], [PAGE_BYTES])
    reserved = connection.call(request, until)
    assert isinstance(reserved, m.Reserved)
    pages = [[np.zeros(PAGE_BYTES, np.uint8)] for _ in numbers]
    sums = connection.write_pages(reserved.grants, pages, until)
    slots, sequences = [g.slot for g in reserved.grants], [g.sequence for g in reserved.grants]
    committed = connection.call(m.Commit(3, slots, sequences, sums), until)
    assert isinstance(committed, m.Committed)
    assert list(committed.mask) == [1] * len(numbers)
    connection.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


async def waiters(client: AsyncPoolClient, count: int) -> None:
    """Until the node holds so many open waits."""
    deadline = time.monotonic() + SOON_S
    while (await client.status())["node"].waiters < count:
        assert time.monotonic() < deadline


async def until_up(client: AsyncPoolClient) -> None:
    deadline = time.monotonic() + SOON_S
    while (await client.check())["node"] is not None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)  # between attempts to connect


def test_a_wait_is_woken_by_the_commit_of_its_last_page(node: ProcessPool) -> None:
    async def test() -> None:
        client = client_of(node)
        waiting = asyncio.create_task(client.wait([key(1), key(2)], SOON_S))
        await waiters(client, 1)
        await asyncio.to_thread(put, node, 1)
        assert await client.exists([key(1), key(2)]) == [True, False]
        assert not waiting.done()
        await asyncio.to_thread(put, node, 2)
        assert await waiting == [True, True]
        client.close()

    run(test)


def test_a_wait_ends_at_its_deadline_with_what_is_there(node: ProcessPool) -> None:
    async def test() -> None:
        client = client_of(node)
        put(node, 1)
        assert await client.wait([key(1), key(2)], 0.05) == [True, False]
        assert await client.wait([key(1)], 0.0) == [True]
        assert await client.exists([]) == []
        client.close()

    run(test)


def test_more_waits_than_the_node_takes_are_all_answered(node: ProcessPool) -> None:
    async def test() -> None:
        client = client_of(node)
        count = 5 * MAX_WAITERS
        waits = [asyncio.create_task(client.wait([key(n)], SOON_S)) for n in range(count)]
        await waiters(client, MAX_WAITERS)
        await asyncio.to_thread(put, node, *range(count))
        assert await asyncio.gather(*waits) == [[True]] * count
        client.close()

    run(test)


def test_waits_given_up_do_not_keep_others_from_theirs(node: ProcessPool) -> None:
    """A cancelled wait stays open at the node until its time is over."""

    async def test() -> None:
        client = client_of(node)
        given_up = [asyncio.create_task(client.wait([key(n)], SOON_S)) for n in range(MAX_WAITERS)]
        await waiters(client, MAX_WAITERS)
        for task in given_up:
            task.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        waiting = asyncio.create_task(client.wait([key(100)], SOON_S))
        await asyncio.to_thread(put, node, 100)
        assert await waiting == [True]
        client.close()

    run(test)


def test_more_keys_than_a_message_holds(node: ProcessPool) -> None:
    async def test() -> None:
        client = client_of(node)
        wanted = [key(n) for n in range(m.MAX_KEYS + 100)]
        put(node, 0, m.MAX_KEYS + 1)
        found = await client.wait(wanted, 0.05)
        assert [n for n, there in enumerate(found) if there] == [0, m.MAX_KEYS + 1]
        client.close()

    run(test)


def test_a_node_that_is_stopped_costs_its_deadline_and_is_found_again(node: ProcessPool) -> None:
    async def test() -> None:
        client = client_of(node, exists_timeout_s=SOON_S, connect_timeout_s=SOON_S, retry_after_s=60.0)
        put(node, 1)
        assert await client.exists([key(1)]) == [True]
        patient = client.config
        client.config = replace(patient, exists_timeout_s=0.2, connect_timeout_s=0.2)
        node.pause()
        waits = [client.wait([key(1), key(2)], 0.1), client.exists([key(1)]), client.wait([key(3)], SOON_S)]
        started_s = time.monotonic()
        assert await asyncio.gather(*waits) == [[False, False], [False], [False]]
        client.config = replace(patient, retry_after_s=0.05)
        for _ in range(5):
            assert await client.exists([key(1)]) == [False]
        assert time.monotonic() - started_s < SOON_S / 2
        node.resume()
        client._retry_at_s.clear()  # the time has come
        await until_up(client)
        assert await client.exists([key(1)]) == [True]
        client.close()

    run(test)


def test_an_answer_that_came_while_the_loop_was_busy_is_taken_and_ends_no_wait(node: ProcessPool) -> None:
    async def test() -> None:
        client = client_of(node, exists_timeout_s=SOON_S, retry_after_s=60.0)
        put(node, 1)
        waiting = asyncio.create_task(client.wait([key(2)], SOON_S))
        await waiters(client, 1)
        client.config = replace(client.config, exists_timeout_s=0.3)
        control = client._open["node"]
        asking = asyncio.create_task(client.exists([key(1)]))
        for _ in range(3):  # the loop's turns in which it asks
            await asyncio.sleep(0)
        busy_until_s = time.monotonic() + 0.4
        while time.monotonic() < busy_until_s:
            assert select.select([control._writer.get_extra_info("socket")], [], [], SOON_S)[0]
        assert await asking == [True]
        assert client._open["node"] is control
        assert not waiting.done()
        await asyncio.to_thread(put, node, 2)
        assert await waiting == [True]
        client.close()

    run(test)


def test_one_question_without_an_answer_leaves_the_connection_to_the_others(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{tmp_path}/n.sock")
    listener.listen()

    def node() -> None:
        channel, _ = listener.accept()
        frames = FrameBuffer()
        while data := channel.recv(65536):
            for body in frames.feed(data):
                request = decode_request(body)
                answer: m.Reply | None = None
                if isinstance(request, m.Hello):
                    answer = m.Welcome(m.PROTOCOL_VERSION, "node", 1, "host", "none", 30.0)
                elif isinstance(request, m.OpenNamespace):
                    answer = m.Opened(request.id, 7)
                elif isinstance(request, m.Exists) and request.keys != [key(0)]:
                    answer = m.Present(request.id, b"\1")
                if answer is not None:
                    channel.sendall(encode_frame(answer))
        channel.close()

    async def look() -> None:
        refs = [PoolNodeRef(node="node", address=f"unix:{tmp_path}/n.sock")]
        client = AsyncPoolClient(PoolClientConfig(nodes=refs, exists_timeout_s=1.0), "ns", {})
        assert await client.exists([key(1)]) == [True]
        asking = asyncio.create_task(client.exists([key(0)]))
        await asyncio.sleep(0)
        while not asking.done():
            assert await client.exists([key(1)]) == [True]
            await asyncio.sleep(0.01)  # between questions
        assert await asking == [False]
        assert await client.exists([key(1)]) == [True]
        client.close()

    thread = threading.Thread(target=node, daemon=True)
    thread.start()
    asyncio.run(look())
    thread.join(10)
    listener.close()


def test_a_node_that_died_ends_waits_at_once_and_comes_back_under_other_numbers(node: ProcessPool) -> None:
    async def test() -> None:
        client = client_of(node)
        waiting = asyncio.create_task(client.wait([key(1)], 60.0))
        await waiters(client, 1)
        before = client._open["node"].namespace
        node.kill()
        assert await waiting == [False]
        remove_arena(node.config)
        await asyncio.to_thread(node.restart)
        other = node.connect()
        assert open_namespace(other, "other") == before
        await until_up(client)
        assert client._open["node"].namespace != before
        await asyncio.to_thread(put, node, 1)
        assert await client.exists([key(1)]) == [True]
        other.close()
        client.close()

    run(test)


def test_a_dropped_namespace_is_opened_again(node: ProcessPool) -> None:
    async def test() -> None:
        client = client_of(node)
        put(node, 1)
        assert await client.exists([key(1)]) == [True]
        other = node.connect()
        other.call(m.DropNamespace(9, "ns"), time.monotonic() + SOON_S)
        other.close()
        assert await client.exists([key(1)]) == [False]
        await asyncio.to_thread(put, node, 1)
        await until_up(client)
        assert await client.exists([key(1)]) == [True]
        client.close()

    run(test)


def test_another_geometry_is_refused_by_name(node: ProcessPool) -> None:
    async def test() -> None:
        put(node, 1)
        refs = [PoolNodeRef(node="node", address=node.address)]
        client = AsyncPoolClient(PoolClientConfig(nodes=refs), "ns", {"page_size": "32"})
        error = (await client.check())["node"]
        assert isinstance(error, PoolRefused)
        assert "page_size" in str(error)
        assert await client.wait([key(1)], 5.0) == [False]
        client.close()

    run(test)


def test_a_batch_that_waited_for_its_turn_has_only_the_time_that_is_left(
    node: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_s: list[float] = []

    def get(client: PoolClient, keys: list[bytes], pages: object, within_s: float) -> list[bool]:
        given_s.append(within_s)
        return [True]

    async def test() -> None:
        client = client_of(node, get_timeout_s=SOON_S)
        for _ in range(client._turn._value):
            await client._turn.acquire()
        reading = asyncio.create_task(client.get([key(1)], [[np.zeros(PAGE_BYTES, np.uint8)]]))
        await asyncio.sleep(0.3)  # of its time
        client._turn.release()
        assert await reading == [True]
        client.close()

    monkeypatch.setattr(PoolClient, "get", get)
    run(test)
    assert SOON_S / 2 < given_s[0] <= SOON_S - 0.3


def test_close_ends_waits_under_way(node: ProcessPool) -> None:
    async def test() -> None:
        client = client_of(node)
        waiting = asyncio.create_task(client.wait([key(1)], 60.0))
        await waiters(client, 1)
        client.close()
        assert await waiting == [False]

    run(test)


def test_a_node_that_hangs_up_on_a_new_connection_before_reading_is_asked_once_more(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{tmp_path}/n.sock")
    listener.listen()

    def node() -> None:
        first, _ = listener.accept()
        select.select([first], [], [], 10)  # its Hello is there
        first.close()  # and was not read: the client gets a reset
        second, _ = listener.accept()
        frames = FrameBuffer()
        with second:
            for answer in (
                m.Welcome(m.PROTOCOL_VERSION, "node", 1, "host", "none", 30.0),
                m.Opened(1, 7),
                m.Present(2, b"\1"),
            ):
                while not list(frames.feed(second.recv(65536))):
                    pass
                second.sendall(encode_frame(answer))

    async def look() -> list[bool]:
        refs = [PoolNodeRef(node="node", address=f"unix:{tmp_path}/n.sock")]
        client = AsyncPoolClient(PoolClientConfig(nodes=refs, exists_timeout_s=10.0), "ns", {})
        found = await client.exists([bytes(32)])
        client.close()
        return found

    thread = threading.Thread(target=node, daemon=True)
    thread.start()
    assert asyncio.run(look()) == [True]
    thread.join(10)
    listener.close()
