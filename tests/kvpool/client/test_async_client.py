"""The asyncio client and a node behind a door: many waits on one connection, silence, resets, restarts.

What both clients promise over nodes that come and go is in test_client_model.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import select
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pdserve.errors import PoolError, PoolRefused, PoolRestarting, PoolUnavailable
from pdserve.kvpool.client import async_client
from pdserve.kvpool.client.async_client import AsyncPoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.transports.async_control import AsyncControl
from pdserve.kvpool.transports.session import make_hello
from tests.support.kvpool.clients import config_of, doors_of
from tests.support.kvpool.door import UPGRADING, Door, Manner
from tests.support.kvpool.faulty import key
from tests.support.waiting import SOON_S, until_in_loop

pytestmark = pytest.mark.timeout(60)
MAX_WAITERS = 8


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    [door] = doors_of(tmp_path, max_waiters=MAX_WAITERS)
    yield door
    door.close()
    door.node.check()


@contextlib.contextmanager
def client_of(
    door: Door, geometry: dict[str, str] | None = None, **options: Any
) -> Iterator[AsyncPoolClient]:
    defaults = {"exists_timeout_s": SOON_S, "connect_timeout_s": SOON_S}
    client = AsyncPoolClient(config_of([door], **{**defaults, **options}), "ns", geometry or {})
    yield client
    client.close()


def put(door: Door, *numbers: int) -> None:
    """Commit pages in "ns", by the node's back door."""
    node, keys = door.node, [key(n) for n in numbers]
    connection = node.connect("writer")
    opened = node.call(connection, m.OpenNamespace(1, "ns", {}), math.inf)
    assert isinstance(opened, m.Opened)
    reserved = node.call(connection, m.Reserve(2, opened.namespace, keys, [4096]), math.inf)
    assert isinstance(reserved, m.Reserved)
    slots, sequences = zip(*((grant.slot, grant.sequence) for grant in reserved.grants), strict=True)
    node.call(connection, m.Commit(3, list(slots), list(sequences), [1] * len(keys)), math.inf)
    node.disconnect(connection)


async def waiters(door: Door, count: int) -> None:
    """Until the node holds so many open waits."""
    await until_in_loop(lambda: door.node.state.status(0, 0.0).waiters >= count)


async def until_up(client: AsyncPoolClient) -> None:
    async def up() -> bool:
        return (await client.check())["n0"] is None

    await until_in_loop(up)


async def until_found(client: AsyncPoolClient) -> None:
    """Until the first page is: a machine that is busy may make a short time-out pass."""

    async def found() -> bool:
        return all(await client.exists([key(1)]))

    await until_in_loop(found)


async def test_a_wait_is_woken_by_the_commit_of_its_last_page_or_ends_with_what_is_there(door: Door) -> None:
    with client_of(door) as client:
        waiting = asyncio.create_task(client.wait([key(1), key(2)], SOON_S))
        await waiters(door, 1)
        await asyncio.to_thread(put, door, 1)
        assert await client.exists([key(1), key(2)]) == [True, False]
        assert await client.wait([key(1), key(2)], 0.02) == [True, False]
        assert await client.wait([key(1)], 0.0) == [True]
        assert await client.exists([]) == []
        assert not waiting.done()
        await asyncio.to_thread(put, door, 2)
        assert await waiting == [True, True]


async def test_a_wait_outlasts_its_slices(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_client, "WAIT_SLICE_S", 0.05)
    with client_of(door) as client:
        waiting = asyncio.create_task(client.wait([key(1), key(2)], SOON_S))
        for _ in range(3):  # slices, each forgotten by the node
            await waiters(door, 1)
            await until_in_loop(lambda: door.node.held == (0, 0, 0))
        await asyncio.to_thread(put, door, 1)
        assert not waiting.done()
        await asyncio.to_thread(put, door, 2)
        assert await waiting == [True, True]


async def test_check_says_which_node_refuses_and_why(door: Door) -> None:
    with client_of(door, {"page_size": "64"}) as client, client_of(door, {"page_size": "32"}) as stranger:
        assert await client.check() == {"n0": None}
        assert isinstance((await stranger.check())["n0"], PoolRefused)


async def test_more_waits_than_the_node_takes_are_all_answered(door: Door) -> None:
    with client_of(door) as client:
        count = 3 * MAX_WAITERS
        waits = [asyncio.create_task(client.wait([key(n)], SOON_S)) for n in range(count)]
        await waiters(door, MAX_WAITERS)
        await asyncio.to_thread(put, door, *range(count))
        assert await asyncio.gather(*waits) == [[True]] * count
        assert door.greeted == 1


async def test_waits_given_up_do_not_keep_others_from_theirs(door: Door) -> None:
    """A cancelled wait stays open at the node until its time is over, and its answer is dropped."""
    with client_of(door) as client:
        given_up = [asyncio.create_task(client.wait([key(n)], SOON_S)) for n in range(MAX_WAITERS)]
        await waiters(door, MAX_WAITERS)
        for task in given_up:
            task.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        waiting = asyncio.create_task(client.wait([key(100)], SOON_S))
        await asyncio.to_thread(put, door, 100)
        assert await waiting == [True]
        assert door.greeted == 1


async def test_fates_and_places_of_pages_are_told_and_of_a_dead_node_nothing(door: Door) -> None:
    with client_of(door) as client:
        await asyncio.to_thread(put, door, 1)
        there, never = await client.fates([key(1), key(2)])
        assert there is not None
        assert there.stored_ago_s is not None
        assert never == m.Fate()
        assert await client.fates([]) == []
        assert await client.places([key(1), key(2)]) == ["dram", None]
        door.kill()
        assert await client.fates([key(1)]) == [None]
        assert await client.places([key(1)]) == [None]


async def test_more_keys_than_a_message_holds(door: Door) -> None:
    with client_of(door) as client:
        wanted = [key(n) for n in range(m.MAX_KEYS + 100)]
        put(door, 0, m.MAX_KEYS + 1)
        found = await client.wait(wanted, 0.02)
        assert [n for n, there in enumerate(found) if there] == [0, m.MAX_KEYS + 1]


async def test_a_silent_node_costs_its_deadline_once_and_is_found_again(door: Door) -> None:
    put(door, 1)
    with client_of(door, exists_timeout_s=0.2, connect_timeout_s=0.2) as client:
        await until_found(client)
        door.manner = Manner.SILENT
        waits = [
            client.wait([key(1), key(2)], 0.1),
            client.exists([key(1)]),
            client.wait([key(3)], SOON_S),
        ]
        assert await asyncio.gather(*waits) == [[False, False], [False], [False]]
        asked = []
        door.swallows = lambda request: bool(asked.append(request))
        for _ in range(50):
            assert await client.exists([key(1)]) == [False]
        assert asked == [], "a node that is down is left alone"
        door.manner = Manner.SERVES
        await until_found(client)


async def test_an_answer_that_came_while_the_loop_was_busy_is_taken_and_ends_no_wait(door: Door) -> None:
    put(door, 1)
    with client_of(door, retry_after_s=60.0) as client:
        waiting = asyncio.create_task(client.wait([key(2)], SOON_S))
        await waiters(door, 1)
        client.config = replace(client.config, exists_timeout_s=0.2)
        control = client._doors.links["n0"]._control
        assert control is not None
        asking = asyncio.create_task(client.exists([key(1)]))
        for _ in range(3):  # the loop's turns in which it asks
            await asyncio.sleep(0)
        busy_until_s = time.monotonic() + 0.3
        while time.monotonic() < busy_until_s:
            assert select.select([control._writer.get_extra_info("socket")], [], [], SOON_S)[0]
        assert await asking == [True]
        assert not waiting.done()
        await asyncio.to_thread(put, door, 2)
        assert await waiting == [True]
        assert door.greeted == 1


async def test_one_question_without_an_answer_leaves_the_connection_to_the_others(door: Door) -> None:
    put(door, 1)
    door.swallows = lambda request: isinstance(request, m.Exists) and request.keys == [key(0)]
    with client_of(door, connect_timeout_s=0.5) as client:
        await until_found(client)
        greeted, patient = door.greeted, client.config
        client.config = replace(patient, exists_timeout_s=0.3)
        asking = asyncio.create_task(client.exists([key(0)]))
        await asyncio.sleep(0)
        client.config = patient
        while not asking.done():
            assert await client.exists([key(1)]) == [True]
        assert await asking == [False]
        assert await client.exists([key(1)]) == [True]
        assert door.greeted == greeted


async def test_a_node_that_died_ends_waits_at_once_and_comes_back_under_other_numbers(door: Door) -> None:
    put(door, 1)
    with client_of(door) as client:
        waiting = asyncio.create_task(client.wait([key(2)], 60.0))
        await waiters(door, 1)
        door.kill()
        assert await waiting == [False]
        door.restart()
        await until_up(client)
        assert await client.exists([key(1), key(2)]) == [True, False]


async def test_an_announced_restart_is_waited_for_also_by_waits_and_once_only(door: Door) -> None:
    put(door, 1)
    with client_of(door, restart_wait_s=SOON_S) as client:
        assert await client.exists([key(1)]) == [True]
        door.manner = Manner.UPGRADES
        door.hang_up(UPGRADING)
        asking = [asyncio.create_task(client.exists([key(1)])) for _ in range(5)]
        door.manner = Manner.SERVES
        assert await asyncio.gather(*asking) == [[True]] * 5
        assert door.greeted == 2
    with client_of(door, restart_wait_s=0.1) as client:
        assert await client.exists([key(1)]) == [True]
        door.manner = Manner.UPGRADES
        door.hang_up(UPGRADING)
        assert isinstance((await client.check())["n0"], PoolError)
        await until_in_loop(lambda: not client._doors.links["n0"].reachable)
        door.manner = Manner.SERVES
        await until_up(client)


async def test_close_ends_waits_under_way_and_what_comes_later(door: Door) -> None:
    with client_of(door) as client:
        waiting = asyncio.create_task(client.wait([key(1)], 60.0))
        await waiters(door, 1)
        client.close()
        assert await waiting == [False]
        assert await client.exists([key(1)]) == await client.wait([key(1)], 5.0) == [False]
        await waiters(door, 0)


async def test_a_node_that_resets_a_new_connection_before_reading_is_asked_once_more(door: Door) -> None:
    put(door, 1)
    door.manner = Manner.RESETS
    with client_of(door) as client:
        asking = asyncio.create_task(client.exists([key(1)]))
        await until_in_loop(lambda: door.reset > 0)
        door.manner = Manner.SERVES
        assert await asking == [True]


async def test_what_hangs_up_a_connection_reaches_all_its_calls_and_its_owner(door: Door) -> None:
    control = await AsyncControl.connect(door.address, make_hello("test", "", "none"), "ns", {})
    told: list[m.Fault] = []
    control.on_fault = told.append
    calls = [
        asyncio.create_task(control.call(lambda i: m.Wait(i, control.namespace, [key(9)], 60.0)))
        for _ in range(3)
    ]
    await waiters(door, 3)
    door.hang_up(UPGRADING)
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [PoolRestarting] * 3
    assert told == [UPGRADING]
    with pytest.raises(PoolRestarting):
        await control.call(m.Ping)


async def test_a_request_between_the_end_of_the_socket_and_its_notice_is_unavailable(door: Door) -> None:
    control = await AsyncControl.connect(door.address, make_hello("test", "", "none"))
    control._writer.transport.abort()
    await asyncio.sleep(0)  # the transport is closed now, and the reading task not yet awake
    assert not control.broken
    with pytest.raises(PoolUnavailable):
        await control.call(m.Ping)


class Rising(AsyncPoolClient):
    """A pool that brings up `at_once` pages between two questions, of those that it was asked for."""

    def __init__(self, in_tier: int, at_once: int) -> None:
        super().__init__(PoolClientConfig(nodes=[PoolNodeRef(node="a", address="unix:/a")]), "ns", {})
        self.tier = dict.fromkeys([key(n) for n in range(in_tier)], "ssd")
        self.at_once = at_once
        self.asked: list[int] = []

    async def places(self, keys: Sequence[bytes], move: int = 0, tenant: str = "") -> list[str | None]:
        assert move == m.UP
        self.asked.append(len(keys))
        found = [self.tier.get(one) for one in keys]
        for one in [one for one in keys if self.tier.get(one) == "ssd"][: self.at_once]:
            self.tier[one] = "dram"
        return found


async def test_pages_are_brought_up_part_by_part_the_first_ones_first() -> None:
    pool = Rising(in_tier=300, at_once=200)
    keys = [key(n) for n in range(310)]
    assert await pool.raise_pages(keys, 60.0) == 300
    assert max(pool.asked) == m.MAX_KEPT_KEYS
    pool.close()
