"""Limits of tenants over two routers and a real Redis: shared, slow, stopped, full of garbage."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from redis.asyncio import Redis

from pdserve.errors import ConfigError
from pdserve.router.config.limits import RedisSettings
from pdserve.router.config.router import RouterConfig
from pdserve.router.config.tenants import Access, Tenant
from pdserve.router.processes.agreement import Agreement, shared_limits
from pdserve.router.sessions.table import connect
from pdserve.router.tenants.api_keys import key_line
from pdserve.router.tenants.tenant import TenantState
from tests.support.router.harness import CHAT, PATIENT, Harness, routed
from tests.support.router.mock_worker import ANSWER, Gate, MockWorker, Received, Wire, workers
from tests.support.router.redis_server import RedisServer, redis_server
from tests.support.router.slow_redis import slow_redis

ALICE = "alice-" + "a" * 20
BY_ALICE = {"authorization": f"Bearer {ALICE}"}
CHANNEL = "pdserve:limits"
STAYS_S, SOON_AWAY_S = 60.0, 1.0
"""How long a Redis may be silent: longer than this machine is ever busy, or no longer than a test waits."""


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


class Replica(NamedTuple):
    harness: Harness
    rates: Agreement

    @property
    def tenant(self) -> TenantState:
        return self.harness.router.gate.tenants.all[0]

    @property
    def left(self) -> float:
        assert self.tenant.requests is not None
        return self.tenant.requests.held(asyncio.get_running_loop().time())

    @property
    def granted(self) -> int:
        return self.tenant.granted or 0

    @property
    def is_apart(self) -> bool:
        return self.harness.stats.limits_apart == 1

    async def ask(self) -> int:
        return (await self.harness.chat(BY_ALICE)).status


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - Redis may still be starting, and tells nobody
            await asyncio.sleep(0.01)


@asynccontextmanager
async def replicas(
    url: str,
    tmp_path: Path,
    count: int = 2,
    worker: MockWorker | None = None,
    away_s: float = STAYS_S,
    **limits: Any,
) -> AsyncIterator[list[Replica]]:
    """Routers before one worker. A tenant may send 100 requests at once."""
    keys = tmp_path / "keys"
    keys.write_text(key_line("alice", ALICE))
    worker = worker or MockWorker("agg")
    limits = limits or {"requests_s": 100.0, "tokens_min": 10**9}
    async with workers(worker), AsyncExitStack() as stack:
        config = RouterConfig(
            agg=(worker.url,),
            deadlines=PATIENT,
            access=Access(keys_file=keys),
            tenants=(Tenant(name="alice", **limits),),
            redis=RedisSettings(url=url, sessions=False, away_s=away_s),
        )
        made = []
        for _ in range(count):
            harness = await stack.enter_async_context(routed(config))
            rates = await stack.enter_async_context(shared_limits(harness.router))
            assert rates is not None
            made.append(Replica(harness, rates))
        yield made


async def test_what_a_tenant_sends_to_one_router_counts_at_the_other(
    redis: RedisServer, tmp_path: Path
) -> None:
    async with replicas(redis.url, tmp_path) as (here, there):
        await until(lambda: here.rates.processes == there.rates.processes == 2 and not here.is_apart)
        for replica in (here, there):
            assert replica.tenant.requests is not None
            replica.tenant.requests.rate_s = 1e-6
        for _ in range(30):
            assert await here.ask() == 200
        await until(lambda: there.left < 71)
        assert here.left == pytest.approx(there.left, abs=0.01) == pytest.approx(70.0, abs=0.01)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_redis_that_hangs_or_dies_leaves_shares_and_no_request_waits_for_it(
    redis: RedisServer, tmp_path: Path, how: signal.Signals
) -> None:
    async with replicas(redis.url, tmp_path, away_s=SOON_AWAY_S) as (here, there):
        await until(lambda: here.rates.processes == there.rates.processes == 2)
        os.kill(redis.process.pid, how)
        assert await here.ask() == 200  # while nobody knows that it hangs, too
        await until(lambda: here.is_apart and there.is_apart)
        assert (here.tenant.share, there.tenant.share) == (0.5, 0.5)
        assert (await here.ask(), await there.ask()) == (200, 200)
        assert here.harness.router.own_metrics().value("limits_apart") == 1
        if how is signal.SIGSTOP:
            os.kill(redis.process.pid, signal.SIGCONT)
            await until(lambda: here.tenant.share == there.tenant.share == 1.0)


async def test_garbage_in_the_channel_is_dropped(redis: RedisServer, tmp_path: Path) -> None:
    async with replicas(redis.url, tmp_path) as (here, there):
        await until(lambda: here.rates.processes == there.rates.processes == 2)
        async with Redis.from_url(redis.url) as client:
            for garbage in (b"", b"\xc1\xff", b"x" * 100_000):
                assert await client.publish(CHANNEL, garbage) == 2
        await until(lambda: here.rates.unread == there.rates.unread == 3)
        assert await here.ask() == 200


@pytest.mark.parametrize(
    "said",
    [b"*3\r\n:1\r\n:2\r\n:3\r\n", b"HTTP/1.1 400 Bad\r\n\r\n", b"\x00" * 999],
)
async def test_a_server_that_is_no_redis_leaves_the_share_and_is_asked_again(
    tmp_path: Path, said: bytes
) -> None:
    asked = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        while await reader.read(1000):
            writer.write(said)
        writer.close()

    path = str(tmp_path / "no-redis")
    server = await asyncio.start_unix_server(answer, path)
    async with replicas(f"unix://{path}", tmp_path, 1, away_s=SOON_AWAY_S) as (here,):
        await until(lambda: here.is_apart)
        assert await here.ask() == 200
        before = asked
        await until(lambda: asked > before + 2)
    server.close()


class Held:
    """Requests at the worker that end when they are told."""

    def __init__(self, worker: MockWorker) -> None:
        self.worker = worker
        self.gates: list[Gate] = []
        self.asked: list[asyncio.Task[int]] = []

    @property
    def running(self) -> int:
        return sum(gate.reached.is_set() and not gate.open.is_set() for gate in self.gates)

    def ask(self, replica: Replica, count: int) -> None:
        for _ in range(count):
            gate = Gate()

            async def answer(wire: Wire, _request: Received, gate: Gate = gate) -> None:
                await gate.passed()
                await wire.body(200, ANSWER)

            self.gates.append(gate)
            self.worker.script(CHAT, answer)
            self.asked.append(asyncio.create_task(replica.ask()))

    def end(self, count: int) -> None:
        for gate in [one for one in self.gates if one.reached.is_set() and not one.open.is_set()][:count]:
            gate.open.set()

    async def all_are_answered(self) -> None:
        for gate in self.gates:
            gate.open.set()
        assert set(await asyncio.gather(*self.asked)) == {200}


@asynccontextmanager
async def two_with_places(
    url: str, tmp_path: Path, places: int, away_s: float = STAYS_S
) -> AsyncIterator[tuple[Held, Replica, Replica]]:
    worker = MockWorker("agg")
    async with replicas(url, tmp_path, 2, worker, away_s, concurrency=places) as (here, there):
        await until(lambda: here.granted + there.granted == places and here.rates.processes == 2)
        held = Held(worker)
        yield held, here, there
        await held.all_are_answered()


async def test_places_of_a_tenant_are_those_of_all_routers_together(
    redis: RedisServer, tmp_path: Path
) -> None:
    async with two_with_places(redis.url, tmp_path, 4) as (held, here, there):
        held.ask(here, 6)
        await until(lambda: held.running == 4)
        held.ask(there, 6)
        await until(lambda: here.granted == 2)  # the others are the next to get a place
        for number in (1, 2):
            held.end(1)
            await until(lambda number=number: there.tenant.running == number)  # type: ignore[misc]
            assert held.running <= 4
        await until(lambda: held.running == 4)
        assert there.tenant.running == here.tenant.running == 2


async def test_a_redis_that_hangs_leaves_each_its_part_of_the_places(
    redis: RedisServer, tmp_path: Path
) -> None:
    async with two_with_places(redis.url, tmp_path, 4, SOON_AWAY_S) as (held, here, there):
        held.ask(here, 8)
        await until(lambda: held.running == 4)
        os.kill(redis.process.pid, signal.SIGSTOP)
        held.ask(there, 3)
        await until(lambda: there.tenant.running == 2)
        await until(lambda: here.granted == there.granted == 2)  # each notices by itself that Redis hangs
        os.kill(redis.process.pid, signal.SIGCONT)
        await until(lambda: not (here.is_apart or there.is_apart))
        held.end(4)
        await until(lambda: held.running == 4)


@pytest.mark.parametrize(("away_s", "is_apart"), [(STAYS_S, False), (SOON_AWAY_S, True)])
async def test_a_slow_redis_is_away_only_where_its_word_takes_longer_than_said(
    redis: RedisServer, tmp_path: Path, away_s: float, is_apart: bool
) -> None:
    async with (
        slow_redis(tmp_path, redis.url) as between,
        replicas(between.url, tmp_path, away_s=away_s) as (here, there),
    ):
        await until(lambda: here.rates.processes == there.rates.processes == 2 and not here.is_apart)
        between.delay_s = 1.5
        answers = between.answers
        await until(lambda: here.is_apart if is_apart else between.answers > answers + 5)
        assert here.is_apart == is_apart
        assert await here.ask() == 200
        between.delay_s = 0.0
        await until(lambda: not here.is_apart)


async def test_that_redis_is_away_is_said_once_and_that_it_is_back_once(
    redis: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="pdserve")

    def said() -> tuple[int, int]:
        words = "processes are not heard", "are shared again"
        away, back = (sum(word in record.getMessage() for record in caplog.records) for word in words)
        return away, back

    async with (
        slow_redis(tmp_path, redis.url) as between,
        replicas(between.url, tmp_path, 1, away_s=SOON_AWAY_S) as (one,),
    ):
        await until(lambda: one.rates.processes == 1 and not one.is_apart)
        between.alter = lambda _: b""
        between.cut()
        await until(lambda: one.is_apart)
        away, back = said()  # more than one where the machine stood still before
        assert away == back + 1
        asked = between.connections
        await until(lambda: between.connections > asked + 3)  # it goes on trying
        assert said() == (away, back)
        between.alter = lambda data: data
        between.cut()
        await until(lambda: not one.is_apart)
        assert said() == (away, away)


def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^redis\.url is none"):
        connect(RedisSettings(url="http://x"), 1.0)
