"""The shared session table against a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.router.config.limits import RedisSettings
from pdserve.router.config.placement import Session
from pdserve.router.config.router import RouterConfig
from pdserve.router.metrics.stats import Stats
from pdserve.router.sessions.keys import SessionKey, named
from pdserve.router.sessions.table import MAX_BATCH, SessionEntry, SharedSessions
from pdserve.security.tokens import SecretFile
from tests.support.router.harness import CHAT, PATIENT, Harness, routed
from tests.support.router.mock_worker import MockWorker, answered_with, workers
from tests.support.router.redis_server import redis_server


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    with redis_server(tmp_path) as server:
        yield server.url


def settings(url: str, **more: float) -> RedisSettings:
    given = {"lookup_s": 2.0, "retry_s": 0.05} | more
    return RedisSettings(url=url, limits=False, **given)  # type: ignore[arg-type]


def table_of(settings: RedisSettings) -> SharedSessions:
    return SharedSessions(settings, 100.0, Stats())


def entry(request_id: str) -> SessionEntry:
    return SessionEntry(request_id, "d1:1", 0.0, "p1:1", 77)


async def eventually(table: SharedSessions, key: SessionKey, request_id: str) -> SessionEntry:
    """What the table says of the key, once it is that request; Redis may still be starting."""
    async with asyncio.timeout(10):
        while True:
            found = await table.get(key)
            if found is not None and found.request_id == request_id:
                return found
            await asyncio.sleep(0.02)


async def ready(table: SharedSessions) -> None:
    async with asyncio.timeout(10):
        while True:
            table.record(named("up"), entry("up"))
            await table._write()
            if await table.get(named("up")) is not None:
                return
            await asyncio.sleep(0.02)


@asynccontextmanager
async def tables(url: str) -> AsyncIterator[tuple[SharedSessions, SharedSessions]]:
    """Two routers' tables in one Redis."""
    here, there = table_of(settings(url)), table_of(settings(url))
    await ready(here)
    yield here, there
    await here.close()
    await there.close()


@asynccontextmanager
async def routers(
    url: str, decode: int, **more: float
) -> AsyncIterator[tuple[SharedSessions, list[MockWorker], Harness, Harness]]:
    """A table to look at, and two routers before the same decode workers."""
    decodes, probe = [MockWorker("decode") for _ in range(decode)], table_of(settings(url))
    async with workers(*decodes):
        urls = tuple(worker.url for worker in decodes)
        session = Session(ttl_s=100.0, sources=("header:x-session-id", "messages"))
        config = RouterConfig(decode=urls, deadlines=PATIENT, session=session, redis=settings(url, **more))
        await ready(probe)
        async with routed(config) as first, routed(config) as second:
            yield probe, decodes, first, second
        await probe.close()


async def test_what_one_router_records_another_finds(redis_url: str) -> None:
    async with tables(redis_url) as (here, there):
        here.record(named("s"), entry("r1"))
        found = await eventually(there, named("s"), "r1")
        assert (found.decode_id, found.prefill_id, found.tokens) == ("d1:1", "p1:1", 77)
        here.record(named("s"), entry("r2"))
        await eventually(there, named("s"), "r2")
        assert await there.get(named("other")) is None
        names = await there._redis.keys("*")
        assert {0 < await there._redis.ttl(name) <= 100 for name in names} == {True}
        assert not any(name.rpartition(b":")[2] == b"s" for name in names)  # keys are hashed


async def test_what_waits_when_a_router_ends_is_written(redis_url: str) -> None:
    async with tables(redis_url) as (here, there):
        names = [f"s{i}" for i in range(2 * MAX_BATCH + 1)]
        for name in names:
            here.record(named(name), entry(name))
        await asyncio.sleep(0)  # the first batch is on its way
        await asyncio.sleep(0)
        await here.close()
        assert [name for name in names if await there.get(named(name)) is None] == []


async def test_a_conversation_is_found_by_its_last_known_link_and_garbage_is_no_session(
    redis_url: str,
) -> None:
    async with tables(redis_url) as (table, _):
        table.record(named("h1"), entry("r1"))
        await table._write()
        table.record(SessionKey("h1", ("h1", "h2", "h3")), entry("r2"))
        await table._write()
        found = await table.get(SessionKey("h1", ("h1", "h2", "h3", "h4", "h5")))
        assert found is not None
        assert found.request_id == "r2"
        assert await table.get(named("h1")) is None
        await table._redis.set(table._name("s"), b"garbage")
        assert await table.get(named("s")) is None


@pytest.mark.parametrize(
    "said", [b"", b"*1\r\n:5\r\n", b"$3\r\nabc\r\n", b"*1\r\n$4\r\n\x91\xa1a\xc1\r\n", b"HTTP/1.1 200\r\n"]
)
async def test_a_redis_that_hangs_or_says_garbage_costs_the_session_and_not_the_request(
    tmp_path: Path, said: bytes
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            writer.write(said)
        writer.close()

    path = str(tmp_path / "no-redis")
    server = await asyncio.start_unix_server(answer, path)
    table = table_of(settings(f"unix://{path}", lookup_s=0.05, retry_s=60))
    async with asyncio.timeout(2):
        assert await table.get(named("s")) is None
    await table.close()
    server.close()


async def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"redis\.url"):
        table_of(settings("http://x"))


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:a-secret-of-redis@127.0.0.1:1/0",
        "redis://:a-secret-of-redis@127.0.0.1:1/0",
        "rediss://user:a-secret-of-redis@127.0.0.1:1",
        "unix://user:a-secret-of-redis@/run/redis.sock",
        "redis://127.0.0.1:1/0?password=a-secret-of-redis",
        "redis://127.0.0.1:1/0?db=0&p%61ssword=a-secret-of-redis",
        "unix:///run/redis.sock?password=a-secret-of-redis&db=1",
        "rediss://127.0.0.1:1?ssl_password=a-secret-of-redis",
        "redis://127.0.0.1:1?Password=a-secret-of-redis",
    ],
)
async def test_a_url_with_a_password_is_refused_without_telling_it(url: str) -> None:
    """URLs are shown in logs and errors."""
    with pytest.raises(ConfigError, match="password_file") as refused:
        table_of(settings(url))
    assert "a-secret-of-redis" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:a-secret#of-redis@127.0.0.1:1",  # what stands before # is taken for a port
        "redis://[user:a-secret-of-redis@127.0.0.1:1",
        "redis+sentinel://:a-secret-of-redis@127.0.0.1:1/service/0",
        "redis://127.0.0.1:1?db=a-secret-of-redis",
        "redis://127.0.0.1:1?credentials=a-secret-of-redis",
    ],
)
async def test_a_url_that_redis_does_not_take_is_refused_without_telling_it(url: str) -> None:
    """At the start: an option that no connection takes would fail each request."""
    with pytest.raises(ConfigError, match=r"^redis\.url .* redis://HOST:PORT/DB") as refused:
        table_of(settings(url))
    assert "secret" not in str(refused.value)


async def test_a_users_name_in_the_url_goes_with_the_password_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of-the-file")
    shared = table_of(
        RedisSettings(url="redis://user@127.0.0.1:1/0?protocol=3", password=SecretFile(tmp_path / "secret"))
    )
    given = shared._redis.connection_pool.connection_kwargs
    assert (given["username"], given["password"]) == ("user", "of-the-file")
    await shared.close()


SESSION = {"x-session-id": "s"}
KEY = named("s").of_model("m")


async def test_a_sessions_turns_are_counted_on_whichever_router_has_them(redis_url: str) -> None:
    async with routers(redis_url, 1) as (probe, [decode], first, second):
        for router in (first, first, second, first):
            decode.script(CHAT, answered_with("x-pdserve-cached: computed=1\r\n"))
            answer = await router.chat(SESSION)
            await eventually(probe, KEY, answer.headers["x-request-id"])
        assert {turn for turn, _ in first.stats.turn_tokens} == {"1", "2", "4-7"}
        assert {turn for turn, _ in second.stats.turn_tokens} == {"3"}


async def test_a_session_that_had_to_move_is_followed_by_the_other_router(redis_url: str) -> None:
    async with routers(redis_url, 4) as (probe, _, first, second):
        home = (await first.chat(SESSION)).headers["x-pdserve-decode"]
        first.router.fleet.members.drain(home, True)
        moved = (await first.chat(SESSION)).headers
        assert moved["x-pdserve-decode"] != home
        await eventually(probe, KEY, moved["x-request-id"])
        followed = (await second.chat(SESSION)).headers
        assert followed["x-pdserve-decode"] == moved["x-pdserve-decode"]
        assert "decode=session" in followed["x-pdserve-plan"]


async def test_what_redis_has_from_before_it_was_away_does_not_undo_later_turns(redis_url: str) -> None:
    async with routers(redis_url, 2, retry_s=1000.0) as (probe, _, router, _):
        table, members = router.router.dispatcher._shared, router.router.fleet.members
        assert table is not None
        first = (await router.chat(SESSION)).headers
        await eventually(probe, KEY, first["x-request-id"])
        table._failed(TimeoutError())
        members.drain(first["x-pdserve-decode"], True)
        moved = (await router.chat(SESSION)).headers
        assert moved["x-pdserve-decode"] != first["x-pdserve-decode"]
        members.drain(first["x-pdserve-decode"], False)
        table._away_until_s = 0.0
        last = (await router.chat(SESSION)).headers
        assert last["x-pdserve-decode"] == moved["x-pdserve-decode"]
        assert "decode=session" in last["x-pdserve-plan"]


async def test_a_session_that_began_anew_at_another_router_is_followed_there(redis_url: str) -> None:
    async with routers(redis_url, 2) as (probe, _, first, second):
        for _ in range(3):
            home = (await first.chat(SESSION)).headers
            await eventually(probe, KEY, home["x-request-id"])
        await probe._redis.delete(probe._name(KEY.links[-1]))
        second.router.fleet.members.drain(home["x-pdserve-decode"], True)
        anew = (await second.chat(SESSION)).headers
        await eventually(probe, KEY, anew["x-request-id"])
        followed = (await first.chat(SESSION)).headers
        assert followed["x-pdserve-decode"] == anew["x-pdserve-decode"] != home["x-pdserve-decode"]
