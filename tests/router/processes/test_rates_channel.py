"""Rates of tenants over two routers and a real Redis: shared, slow, stopped, full of garbage."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from redis.asyncio import Redis

from pdserve.errors import ConfigError
from pdserve.router.config.router import RouterConfig
from pdserve.router.config.tenants import Access, SharedRates, Tenant
from pdserve.router.processes.rates_channel import shared_rates
from pdserve.router.tenants.api_keys import key_line
from pdserve.router.tenants.tenant import TenantState
from tests.support.router.harness import FAST, Harness, routed
from tests.support.router.mock_worker import MockWorker, workers

ALICE = "alice-" + "a" * 20
BY_ALICE = {"authorization": f"Bearer {ALICE}"}
CHANNEL = "pdserve:rates"


class Server(NamedTuple):
    process: subprocess.Popen[bytes]
    url: str


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Server]:
    program = shutil.which("redis-server")
    assert program, "redis-server is missing: apt-get install redis-server"
    socket = tmp_path / "redis.sock"
    process = subprocess.Popen(
        [program, "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(tmp_path)],
        stdout=subprocess.DEVNULL,
    )
    try:
        yield Server(process, f"unix://{socket}")
    finally:
        process.kill()
        process.wait()


def alice(harness: Harness) -> TenantState:
    return harness.router.gate.tenants.all[0]


def left(harness: Harness) -> float:
    bucket = alice(harness).requests
    assert bucket is not None
    return bucket.held(asyncio.get_running_loop().time())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(15):
        while not condition():  # noqa: ASYNC110 - Redis may still be starting, and tells nobody
            await asyncio.sleep(0.01)


@asynccontextmanager
async def replicas(url: str, tmp_path: Path, count: int = 2) -> AsyncIterator[list[Harness]]:
    """Routers before one worker. A tenant may send 100 requests at once, and then one in 100 s."""
    keys = tmp_path / "keys"
    keys.write_text(key_line("alice", ALICE))
    worker = MockWorker("agg")
    async with workers(worker), AsyncExitStack() as stack:
        config = RouterConfig(
            agg=(worker.url,),
            deadlines=FAST,
            access=Access(keys_file=keys),
            tenants=(Tenant(name="alice", requests_s=100.0, tokens_min=10**9),),
            shared_rates=SharedRates(url=url, channel=CHANNEL),
        )
        harnesses = [await stack.enter_async_context(routed(config)) for _ in range(count)]
        for harness in harnesses:
            await stack.enter_async_context(shared_rates(harness.router))
        yield harnesses


def are_together(*harnesses: Harness) -> bool:
    """By what they would do without Redis: each has heard all others."""
    return all(one.stats.rates_apart == 0 for one in harnesses)


async def test_what_a_tenant_sends_to_one_router_counts_at_the_other(redis: Server, tmp_path: Path) -> None:
    async with replicas(redis.url, tmp_path) as (here, there):
        async with Redis.from_url(redis.url) as client:
            await until(lambda: Path(redis.url.removeprefix("unix://")).exists())
            while (await client.pubsub_numsub(CHANNEL))[0][1] < 2:
                await asyncio.sleep(0.01)
        bucket = alice(there).requests
        assert bucket is not None
        bucket.rate_s = alice(here).requests.rate_s = 1e-6  # type: ignore[union-attr]  # no refill to wait out
        for _ in range(30):
            assert (await here.chat(BY_ALICE)).status == 200
        await until(lambda: left(there) <= 70.01)
        assert left(there) == pytest.approx(left(here), abs=0.01) == pytest.approx(70.0, abs=0.01)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_redis_that_hangs_or_dies_leaves_shares_and_no_request_waits_for_it(
    redis: Server, tmp_path: Path, how: signal.Signals
) -> None:
    async with replicas(redis.url, tmp_path) as (here, there):
        await until(lambda: Path(redis.url.removeprefix("unix://")).exists())
        await until(lambda: are_together(here, there))
        async with Redis.from_url(redis.url) as client:
            while (await client.pubsub_numsub(CHANNEL))[0][1] < 2:
                await asyncio.sleep(0.01)
        await until(lambda: left(here) == left(there) == 100.0)
        await asyncio.sleep(1.2)  # two heartbeats of each: they know each other
        os.kill(redis.process.pid, how)
        assert (await here.chat(BY_ALICE)).status == 200  # at once: it would not end before SIGCONT else
        await until(lambda: here.stats.rates_apart == there.stats.rates_apart == 1)
        assert (alice(here).share, alice(there).share) == (0.5, 0.5)
        assert (await there.chat(BY_ALICE)).status == 200
        metrics = here.router.own_metrics()
        assert metrics.value("rates_apart") == 1
        if how is signal.SIGSTOP:
            os.kill(redis.process.pid, signal.SIGCONT)
            await until(lambda: here.stats.rates_apart == there.stats.rates_apart == 0)
            assert (alice(here).share, alice(there).share) == (1.0, 1.0)


async def test_garbage_in_the_channel_and_a_server_that_is_no_redis_do_no_harm(
    redis: Server, tmp_path: Path
) -> None:
    async with replicas(redis.url, tmp_path, 1) as (here,):
        async with Redis.from_url(redis.url) as client:
            await until(lambda: Path(redis.url.removeprefix("unix://")).exists())
            while (await client.pubsub_numsub(CHANNEL))[0][1] < 1:
                await asyncio.sleep(0.01)
            for garbage in (b"", b"\xc1\xff", b"x" * 100_000):
                assert await client.publish(CHANNEL, garbage) == 1
        assert (await here.chat(BY_ALICE)).status == 200
        await until(lambda: left(here) > 98)
    said = iter([b"$-5\r\n", b"*3\r\n:1\r\n:2\r\n:3\r\n", b"HTTP/1.1 400 Bad\r\n\r\n", b"+OK\r\n", b"\x00" * 999])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(next(said, b":0\r\n"))
        await writer.drain()
        writer.close()

    path = str(tmp_path / "no-redis")
    server = await asyncio.start_unix_server(answer, path)
    async with replicas(f"unix://{path}", tmp_path, 1) as (here,):
        await until(lambda: here.stats.rates_apart == 1)
        assert (await here.chat(BY_ALICE)).status == 200
    server.close()


async def test_a_url_that_is_none_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"shared_rates\.url"):
        async with replicas("http://x", tmp_path):
            pass
