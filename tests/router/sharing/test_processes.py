"""Real router processes behind one port. What their parent does in all cases is in test_parent.py."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from pdserve.router.request.request import KEEP_ALIVE
from pdserve.router.sharing.files import MetricsFiles
from pdserve.router.sharing.gossip import REPORT_S
from pdserve.router.tenants.api_keys import key_line
from tests.support.processes import free_ports
from tests.support.router.harness import Connection, Response, chat_body
from tests.support.router.mock_worker import (
    ANSWER,
    EVENTS,
    Gate,
    MockWorker,
    Received,
    Wire,
    held,
    stream,
    workers,
)
from tests.support.router.process import CHAT, RouterProcess, routing, until
from tests.support.router.redis_server import redis_server

pytestmark = pytest.mark.long

SESSION = {"x-session-id": "s"}

ADMIN_KEY = "administrators-key-of-this-test"
ALICE, BOB = "alice-" + "a" * 20, "bob-" + "b" * 20
SEVERAL = 10
NEVER = "probe.interval_s = 1000.0\nprobe.timeout_s = 60.0\n"
"""A process knows of its workers what it found as it started."""


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


class Site:
    """The files of a router with API keys, and its admin API."""

    def __init__(self, directory: Path, decode: list[MockWorker]) -> None:
        [self.admin_port] = free_ports(1)
        self.file, self.keys = directory / "router.toml", directory / "keys"
        self._decode = decode
        self.keys.write_text(key_line("alice", ALICE))
        self.router: RouterProcess

    def text(self, tenants: str = "", probe: str = "probe.interval_s = 0.1\n") -> str:
        return (
            f"decode = {json.dumps([worker.url for worker in self._decode])}\nprocesses = 2\n{probe}"
            f'access = {{ keys_file = "{self.keys}", show_load = true }}\n'
            f'[admin]\nport = {self.admin_port}\nkey = "{ADMIN_KEY}"\n{tenants}'
        )

    async def admin(self, method: str, path: str, body: Any = None) -> Response:
        connection = Connection(*await asyncio.open_connection("127.0.0.1", self.admin_port))
        data = json.dumps(body).encode() if body is not None else b""
        await connection.send(path, data, {"authorization": f"Bearer {ADMIN_KEY}"}, method)
        try:
            return await connection.response()
        finally:
            connection.leave()

    async def ask(self, key: str) -> Response:
        return await self.router.ask(headers={"authorization": f"Bearer {key}"})

    async def used(self, key: str) -> set[str]:
        """By whom requests are answered, or how they are refused, by any process."""
        answers = [await self.ask(key) for _ in range(SEVERAL)]
        return {answer.headers.get("x-pdserve-decode", str(answer.status)) for answer in answers}

    async def until_used(self, key: str, expected: set[str]) -> None:
        async def is_used() -> bool:
            return await self.used(key) == expected

        await until(is_used)


@pytest.mark.timeout(200)
async def test_processes_share_the_port_and_are_replaced_without_a_failure_and_end_with_their_parent(
    tmp_path: Path,
) -> None:
    decode, other = MockWorker("decode"), MockWorker("decode")
    file = tmp_path / "router.toml"
    limited = 'processes = 2\ntenants = [{ name = "*", concurrency = 3 }]\n'
    async with workers(decode, other), routing(file, f'decode = ["{decode.url}"]\n{limited}') as router:
        running = most = 0
        enough = asyncio.Event()

        async def count(wire: Wire, request: Received) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            if running == 3:
                enough.set()
            await enough.wait()
            await wire.body(200, ANSWER)
            running -= 1

        decode.script(CHAT, *[count] * 20)
        answers = await asyncio.gather(*(router.ask() for _ in range(20)))
        assert {answer.body for answer in answers} == {ANSWER}
        assert most == 3  # a tenant's limit holds over both

        async def added_up() -> bool:  # a process counts a request a moment after its answer
            requests = await router.metric("requests_total")
            assert requests <= 20
            return requests == 20 and await router.metric("worker_healthy") == 1

        await until(added_up)
        before = router.children
        gate = Gate()
        decode.script(CHAT, stream(EVENTS, gate, gate_after=1))
        client = await router.start_streaming()
        file.write_text(f'decode = ["{other.url}"]\n{limited}')
        router.process.send_signal(signal.SIGHUP)
        stop = asyncio.Event()

        async def load() -> None:
            while not stop.is_set():
                assert (await router.ask()).body == ANSWER

        loading = asyncio.create_task(load())

        async def replaced() -> bool:
            return len(router.children - before) == 2 and len(router.children) <= 3  # one has a stream

        await until(replaced)
        gate.open.set()
        rest = b""
        while data := await client.chunk():
            rest += data
        assert rest.replace(KEEP_ALIVE, b"") == b"".join(EVENTS[1:])
        await router.replaced(before)
        seen = len(other.got(CHAT))
        await other.wait_until(lambda: len(other.got(CHAT)) > seen)
        stop.set()
        await loading

        last = router.children
        router.process.kill()

        async def gone() -> bool:
            return not any(map(exists, last))

        await until(gone)
        await router.ended()


@pytest.mark.timeout(200)
async def test_every_process_does_as_one_was_told_and_so_does_one_that_starts_later(tmp_path: Path) -> None:
    old, new, third = (MockWorker("decode") for _ in range(3))
    site = Site(tmp_path, [old, third])
    async with workers(old, new, third), routing(site.file, site.text()) as router:
        site.router = router
        joined = await site.admin("POST", "/workers", {"url": new.url, "role": "decode"})
        assert joined.status == 201
        for worker in (old, third):
            assert (await site.admin("POST", f"/workers/{worker.id}/drain")).status == 200
        await site.until_used(ALICE, {new.id})
        site.keys.write_text(key_line("bob", BOB))
        assert (await site.admin("POST", "/reload")).json() == {"tenants": ["bob"]}
        await site.until_used(ALICE, {"401"})
        await site.until_used(BOB, {new.id})

        before = router.children
        site.file.write_text(site.text(probe=NEVER))
        starting = Gate()
        old.script("/pd/ready", held(starting, b'{"ready": true}'))
        router.process.send_signal(signal.SIGHUP)
        await starting.reached.wait()  # the first successor hears of this, too:
        assert (await site.admin("POST", f"/workers/{third.id}/undrain")).status == 200
        assert (await site.admin("POST", f"/workers/{new.id}/drain")).status == 200
        starting.open.set()
        await router.replaced(before)
        assert await site.used(BOB) == {third.id}
        victim = min(router.children)
        os.kill(victim, signal.SIGKILL)

        async def is_served_again() -> bool:
            return victim not in router.children and len(router.children) == 2

        await until(is_served_again)
        assert await site.used(BOB) == {third.id}


@pytest.mark.timeout(200)
async def test_what_is_told_of_workers_and_tenants_is_that_of_all_processes_or_is_not_told(
    tmp_path: Path,
) -> None:
    decode, gate = MockWorker("decode"), Gate()
    site = Site(tmp_path, [decode])
    async with workers(decode), routing(site.file, site.text()) as router:
        site.router = router
        decode.script(CHAT, *[held(gate)] * SEVERAL)
        asking = [asyncio.create_task(site.ask(ALICE)) for _ in range(SEVERAL)]
        await decode.wait_until(lambda: len(decode.got(CHAT)) == SEVERAL)
        assert (await site.admin("POST", f"/workers/{decode.id}/drain")).json()["in_flight"] == SEVERAL
        [worker] = (await site.admin("GET", "/workers")).json()["workers"]
        assert worker["in_flight"] == SEVERAL
        [alice] = (await site.admin("GET", "/tenants")).json()["tenants"]
        assert alice["running"] == alice["use"]["requests"] == SEVERAL

        silent = max(router.children)  # the first has the admin API
        os.kill(silent, signal.SIGSTOP)
        try:
            drained = (await site.admin("POST", f"/workers/{decode.id}/drain")).json()
            assert drained == {"id": decode.id, "draining": True, "in_flight": None}
            [worker] = (await site.admin("GET", "/workers")).json()["workers"]
            assert (worker["draining"], worker["in_flight"]) == (True, None)
            assert (await site.admin("GET", "/tenants")).error["message"].startswith("Not every process")
        finally:
            os.kill(silent, signal.SIGCONT)

        before = router.children
        router.process.send_signal(signal.SIGHUP)

        async def replaced() -> bool:  # the old ones have yet to finish
            return len(router.children - before) == 2

        await until(replaced)

        async def all_told() -> bool:
            [worker] = (await site.admin("GET", "/workers")).json()["workers"]
            return worker["in_flight"] == SEVERAL

        await until(all_told)
        assert (await site.admin("DELETE", f"/workers/{decode.id}")).json()["in_flight"] == SEVERAL
        gate.open.set()
        assert {answer.body for answer in await asyncio.gather(*asking)} == {ANSWER}


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.timeout(200)
async def test_a_reload_under_load_refuses_and_fails_nothing_and_what_is_wrong_changes_nothing(
    tmp_path: Path, processes: int
) -> None:
    first, second = MockWorker("decode"), MockWorker("decode")
    file, keys = tmp_path / "router.toml", tmp_path / "keys"
    keys.write_text(key_line("alice", ALICE))

    def text(worker: MockWorker) -> str:
        return (
            f'decode = ["{worker.url}"]\nprocesses = {processes}\nstop_grace_s = 0.1\n'
            f'access = {{ keys_file = "{keys}", show_load = true }}\n'
        )

    async with workers(first, second), routing(file, text(first)) as router:
        site = Site(tmp_path, [])
        site.router = router
        stop, answered = asyncio.Event(), 0

        async def load() -> None:
            nonlocal answered
            kept = await router.connect()
            while not stop.is_set():
                assert (await site.ask(ALICE)).body == ANSWER
                try:
                    await kept.send(
                        CHAT, json.dumps(chat_body()).encode(), {"authorization": f"Bearer {ALICE}"}
                    )
                    answer = await kept.response()
                except (OSError, asyncio.IncompleteReadError):  # kept idle until its process ended
                    kept = await router.connect()
                    continue
                assert answer.body == ANSWER
                if answer.headers.get("connection") == "close":
                    kept = await router.connect()
                answered += 1

        async def reloaded(content: str, said: str) -> None:
            file.write_text(content)
            router.process.send_signal(signal.SIGHUP)
            await router.said(said.encode())

        gate = Gate()
        first.script(CHAT, stream(EVENTS, gate, gate_after=1))
        client = await router.connect()
        body = json.dumps(chat_body(stream=True)).encode()
        await client.send(CHAT, body, {"authorization": f"Bearer {ALICE}"})
        assert (await client.head()).status == 200
        loading = [asyncio.create_task(load()) for _ in range(4)]
        await reloaded(text(second), "have the new configuration")
        for wrong in (
            f'decode = ["{first.url}"\n',
            "",
            text(second).replace("processes = ", "processes = 1"),
        ):
            await reloaded(wrong, "the configuration is not changed")
        keys.write_text("nonsense")
        await reloaded(text(second), "the configuration is not changed")
        assert await site.used(ALICE) == {second.id}
        gate.open.set()  # long after `stop_grace_s` the stream goes on in the process that was replaced
        events = b""
        while data := await client.chunk():
            events += data
        assert events.replace(KEEP_ALIVE, b"") == b"".join(EVENTS)
        keys.write_text(key_line("alice", ALICE) + key_line("bob", BOB))
        limited = '[[tenants]]\nname = "bob"\nrequests_s = 0.001\n'
        before = router.children
        await reloaded(text(first) + limited, "have the new configuration")
        await router.replaced(before, processes)
        assert await site.used(ALICE) == {first.id}
        assert "429" in await site.used(BOB)
        stop.set()
        await asyncio.gather(*loading)
        assert answered > 10


@pytest.mark.timeout(200)
async def test_a_session_goes_on_in_whichever_process_has_its_next_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is between them but the runtime directory."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    prefill, decodes = MockWorker("prefill"), [MockWorker("decode") for _ in range(4)]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(workers(prefill, *decodes))
        urls = json.dumps([worker.url for worker in decodes])
        text = f'prefill = ["{prefill.url}"]\ndecode = {urls}\nprocesses = 2\n'
        router = await stack.enter_async_context(routing(tmp_path / "router.toml", text))
        [directory] = tmp_path.glob("pdserve-router-*")  # noqa: ASYNC240
        files = MetricsFiles(directory)
        headers = (await router.ask(headers=SESSION)).headers
        home = headers["x-pdserve-decode"]

        async def all_have_had_turns() -> bool:
            await asyncio.sleep(6 * REPORT_S)  # a client reads, or a tool runs; the machine may be busy
            headers = (await router.ask(headers=SESSION)).headers
            assert headers["x-pdserve-decode"] == home
            assert "decode=session" in headers["x-pdserve-plan"]
            await router.metric("requests_total")
            read = [files.read(name) for name in files.stamps(but="")]
            return min(one.total("requests") for one in read if one is not None) >= 4

        await until(all_have_had_turns)
        assert await router.metric("sessions") == 1  # though it is in the tables of two processes


@pytest.mark.timeout(200)
async def test_routers_that_share_a_redis_know_each_others_sessions_and_charges_and_none_waits_for_it(
    tmp_path: Path,
) -> None:
    decodes = [MockWorker("decode") for _ in range(4)]
    keys = tmp_path / "keys"
    keys.write_text(key_line("alice", ALICE))
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(redis_server(tmp_path))
        await stack.enter_async_context(workers(*decodes))
        text = (
            f"decode = {json.dumps([worker.url for worker in decodes])}\n"
            f'redis.url = "{redis.url}"\naccess = {{ keys_file = "{keys}", show_load = true }}\n'
            'tenants = [{ name = "*", requests_s = 20, concurrency = 50 }]\n'
        )
        first = await stack.enter_async_context(routing(tmp_path / "here.toml", text))
        second = await stack.enter_async_context(routing(tmp_path / "there.toml", text))
        by_alice = {"authorization": f"Bearer {ALICE}"}

        async def left(router: RouterProcess) -> int:
            return int((await router.ask(headers=by_alice)).headers["x-ratelimit-remaining-requests"])

        async def is_charged() -> bool:
            await asyncio.gather(*(first.ask(headers=by_alice) for _ in range(10)))
            await asyncio.sleep(1.5 * REPORT_S)
            return await left(second) < 12

        await until(is_charged)
        home = (await first.ask(headers=by_alice | SESSION)).headers["x-pdserve-decode"]
        await asyncio.sleep(2 * REPORT_S)
        headers = (await second.ask(headers=by_alice | SESSION)).headers
        assert (headers["x-pdserve-decode"], "decode=session" in headers["x-pdserve-plan"]) == (
            home,
            True,
        )

        os.kill(redis.process.pid, signal.SIGSTOP)

        async def is_apart() -> bool:
            assert (await first.ask(headers=by_alice)).status in (200, 429)
            return "50 %" in (await second.said(rb"holds .* of the"))[0].decode()

        await until(is_apart)
        os.kill(redis.process.pid, signal.SIGCONT)
        await second.said(rb"Redis is back")
