"""The shared session table against a real Redis."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.router.config.placement import Session, SharedTable
from pdserve.router.config.router import RouterConfig
from pdserve.router.sessions.keys import SessionKey, named
from pdserve.router.sessions.redis_table import MAX_BATCH, SharedSessions
from pdserve.router.sessions.table import SessionEntry
from tests.support.router.harness import FAST, routed, run
from tests.support.router.mock_worker import MockWorker, answered_with, workers


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    program = shutil.which("redis-server")
    assert program, "redis-server is missing: apt-get install redis-server"
    socket = tmp_path / "redis.sock"
    server = subprocess.Popen(
        [program, "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(tmp_path)],
        stdout=subprocess.DEVNULL,
    )
    try:
        yield f"unix://{socket}"
    finally:
        server.kill()
        server.wait()


def settings(url: str, **more: float) -> Session:
    redis = SharedTable(url=url, **({"timeout_s": 2.0, "retry_s": 0.05} | more))  # type: ignore[arg-type]
    return Session(ttl_s=100.0, redis=redis, sources=("header:x-session-id", "messages"))


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


def test_what_one_router_records_another_finds(redis_url: str) -> None:
    async def main() -> None:
        here, there = SharedSessions(settings(redis_url)), SharedSessions(settings(redis_url))
        await ready(here)
        here.record(named("s"), entry("r1"))
        found = await eventually(there, named("s"), "r1")
        assert (found.decode_id, found.prefill_id, found.tokens) == ("d1:1", "p1:1", 77)
        here.record(named("s"), entry("r2"))
        await eventually(there, named("s"), "r2")
        assert await there.get(named("other")) is None
        names = await there._redis.keys("*")
        assert {0 < await there._redis.ttl(name) <= 100 for name in names} == {True}
        assert not any(name.rpartition(b":")[2] == b"s" for name in names)  # keys are hashed
        await here.close()
        await there.close()

    run(main())


def test_what_waits_when_a_router_ends_is_written(redis_url: str) -> None:
    async def main() -> None:
        here, there = SharedSessions(settings(redis_url)), SharedSessions(settings(redis_url))
        await ready(here)
        names = [f"s{i}" for i in range(2 * MAX_BATCH + 1)]
        for name in names:
            here.record(named(name), entry(name))
        await asyncio.sleep(0)  # the first batch is on its way
        await asyncio.sleep(0)
        await here.close()
        assert [name for name in names if await there.get(named(name)) is None] == []
        await there.close()

    run(main())


def test_a_conversation_is_found_by_its_last_known_link(redis_url: str) -> None:
    async def main() -> None:
        table = SharedSessions(settings(redis_url))
        await ready(table)
        table.record(named("h1"), entry("r1"))
        await table._write()
        table.record(SessionKey("h1", ("h1", "h2", "h3")), entry("r2"))
        await table._write()
        found = await table.get(SessionKey("h1", ("h1", "h2", "h3", "h4", "h5")))
        assert found is not None
        assert found.request_id == "r2"
        assert await table.get(named("h1")) is None
        await table.close()

    run(main())


def test_garbage_in_redis_is_no_session(redis_url: str) -> None:
    async def main() -> None:
        table = SharedSessions(settings(redis_url))
        await ready(table)
        await table._redis.set(table._name("s"), b"garbage")
        assert await table.get(named("s")) is None
        await table.close()

    run(main())


def test_a_redis_that_is_away_costs_one_time_out_and_is_left_alone(tmp_path: Path) -> None:
    async def main() -> None:
        table = SharedSessions(settings(f"unix://{tmp_path}/nobody", timeout_s=0.2, retry_s=60))
        assert await table.get(named("s")) is None
        assert table._is_away()
        table.record(named("s"), entry("r"))
        assert not table._waiting
        await table.close()

    run(main())


def test_a_redis_that_hangs_is_given_up_in_time(tmp_path: Path) -> None:
    async def main() -> None:
        path = str(tmp_path / "hangs")
        server = await asyncio.start_unix_server(lambda reader, writer: None, path)
        table = SharedSessions(settings(f"unix://{path}", timeout_s=0.05, retry_s=60))
        async with asyncio.timeout(2):
            assert await table.get(named("s")) is None
        await table.close()
        server.close()

    run(main())


def test_a_url_that_is_none_is_refused() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match=r"session\.redis\.url"):
            SharedSessions(settings("http://x"))

    run(main())


def test_a_sessions_turns_are_counted_on_whichever_router_has_them(redis_url: str) -> None:
    async def main() -> None:
        decode = MockWorker("decode")
        async with workers(decode):
            config = RouterConfig(decode=(decode.url,), deadlines=FAST, session=settings(redis_url))
            probe = SharedSessions(settings(redis_url))
            await ready(probe)
            async with routed(config) as first, routed(config) as second:
                for router in (first, first, second, first):
                    decode.script("/v1/chat/completions", answered_with("x-pdserve-cached: computed=1\r\n"))
                    answer = await router.chat(headers={"x-session-id": "s"})
                    await eventually(probe, named("s").of_model("m"), answer.headers["x-request-id"])
                assert {turn for turn, _ in first.stats.turn_tokens} == {"1", "2", "4-7"}
                assert {turn for turn, _ in second.stats.turn_tokens} == {"3"}
            await probe.close()

    run(main())


def test_a_session_that_had_to_move_is_followed_by_the_other_router(redis_url: str) -> None:
    async def main() -> None:
        decodes = [MockWorker("decode") for _ in range(4)]
        async with workers(*decodes):
            config = RouterConfig(
                decode=tuple(w.url for w in decodes), deadlines=FAST, session=settings(redis_url)
            )
            probe = SharedSessions(settings(redis_url))
            await ready(probe)
            async with routed(config) as first, routed(config) as second:
                session = {"x-session-id": "moves"}
                home = (await first.chat(headers=session)).headers["x-pdserve-decode"]
                first.router.fleet.members.drain(home, True)
                moved = (await first.chat(headers=session)).headers
                assert moved["x-pdserve-decode"] != home
                await eventually(probe, named("moves").of_model("m"), moved["x-request-id"])
                followed = (await second.chat(headers=session)).headers
                assert followed["x-pdserve-decode"] == moved["x-pdserve-decode"]
                assert "decode=session" in followed["x-pdserve-plan"]
            await probe.close()

    run(main())


def test_what_redis_has_from_before_it_was_away_does_not_undo_later_turns(redis_url: str) -> None:
    async def main() -> None:
        decodes = [MockWorker("decode") for _ in range(2)]
        async with workers(*decodes):
            config = RouterConfig(
                decode=tuple(w.url for w in decodes),
                deadlines=FAST,
                session=settings(redis_url, retry_s=1000.0),
            )
            probe = SharedSessions(settings(redis_url))
            await ready(probe)
            async with routed(config) as router:
                session, table = {"x-session-id": "s"}, router.router.dispatcher._shared
                assert table is not None
                first = (await router.chat(headers=session)).headers
                await eventually(probe, named("s").of_model("m"), first["x-request-id"])
                table._failed(TimeoutError())
                router.router.fleet.members.drain(first["x-pdserve-decode"], True)
                moved = (await router.chat(headers=session)).headers
                assert moved["x-pdserve-decode"] != first["x-pdserve-decode"]
                router.router.fleet.members.drain(first["x-pdserve-decode"], False)
                table._away_until_s = 0.0
                last = (await router.chat(headers=session)).headers
                assert last["x-pdserve-decode"] == moved["x-pdserve-decode"]
                assert "decode=session" in last["x-pdserve-plan"]
            await probe.close()

    run(main())


def test_a_session_that_began_anew_at_another_router_is_followed_there(redis_url: str) -> None:
    async def main() -> None:
        decodes = [MockWorker("decode") for _ in range(2)]
        async with workers(*decodes):
            config = RouterConfig(
                decode=tuple(w.url for w in decodes), deadlines=FAST, session=settings(redis_url)
            )
            probe = SharedSessions(settings(redis_url))
            await ready(probe)
            async with routed(config) as first, routed(config) as second:
                session, key = {"x-session-id": "s"}, named("s").of_model("m")
                for _ in range(3):
                    home = (await first.chat(headers=session)).headers
                    await eventually(probe, key, home["x-request-id"])
                await probe._redis.delete(probe._name(key.links[-1]))
                second.router.fleet.members.drain(home["x-pdserve-decode"], True)
                anew = (await second.chat(headers=session)).headers
                await eventually(probe, key, anew["x-request-id"])
                followed = (await first.chat(headers=session)).headers
                assert followed["x-pdserve-decode"] == anew["x-pdserve-decode"] != home["x-pdserve-decode"]
            await probe.close()

    run(main())
