"""Limits of tenants over two routers and a real Redis: shared, stopped, or no Redis at all."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from pdserve.errors import ConfigError
from pdserve.router.config.limits import RedisSettings
from pdserve.router.config.router import RouterConfig
from pdserve.router.config.tenants import Access, Tenant
from pdserve.router.processes.agreement import Agreement, shared_limits
from pdserve.router.sessions.table import connect
from pdserve.router.tenants.api_keys import key_line
from pdserve.router.tenants.tenant import TenantState
from tests.support.router.harness import PATIENT, Harness, routed
from tests.support.router.mock_worker import MockWorker, workers
from tests.support.router.redis_server import RedisServer, redis_server

ALICE = "alice-" + "a" * 20
BY_ALICE = {"authorization": f"Bearer {ALICE}"}
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
    url: str, tmp_path: Path, count: int = 2, away_s: float = STAYS_S
) -> AsyncIterator[list[Replica]]:
    """Routers before one worker. A tenant may send 100 requests at once."""
    keys = tmp_path / "keys"
    keys.write_text(key_line("alice", ALICE))
    worker = MockWorker("agg")
    async with workers(worker), AsyncExitStack() as stack:
        config = RouterConfig(
            agg=(worker.url,),
            deadlines=PATIENT,
            access=Access(keys_file=keys),
            tenants=(Tenant(name="alice", requests_s=100.0, tokens_min=10**9),),
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


def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^redis\.url is none"):
        connect(RedisSettings(url="http://x"), 1.0)
