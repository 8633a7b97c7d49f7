"""Real router processes behind one port. What their parent does in all cases is in test_parent.py."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from pdserve.router.request.answer import KEEP_ALIVE
from pdserve.router.tenants.api_keys import key_line
from tests.support.processes import free_ports
from tests.support.router.harness import Connection, Response
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

pytestmark = pytest.mark.long

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
    limited = "processes = 2\ntenant_defaults.concurrency = 3\n"
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


@pytest.mark.timeout(120)
async def test_one_process_alone_takes_over_workers_keys_and_tenants_and_nothing_of_what_is_wrong(
    tmp_path: Path,
) -> None:
    first, second = MockWorker("decode"), MockWorker("decode")
    async with workers(first, second):
        file, keys = tmp_path / "router.toml", tmp_path / "keys"
        keys.write_text(key_line("alice", ALICE))

        def text(worker: MockWorker, more: str = "client_keepalive_s = 60.0\n") -> str:
            return (
                f'decode = ["{worker.url}"]\naccess.keys_file = "{keys}"\n'
                f"probe.interval_s = 0.1\nprobe.timeout_s = 60.0\n{more}"
            )

        def change(content: str) -> None:
            file.write_text(content)
            router.process.send_signal(signal.SIGHUP)

        site = Site(tmp_path, [])
        file.write_text(text(first))
        site.router = router = await RouterProcess.start("--config", str(file))
        await router.listening()
        change(text(second))
        await router.said(f"joined: decode {second.id}; left: decode {first.id}".encode())
        change(f'decode = ["{first.url}"\n')  # no TOML: nothing changes
        await router.said(b"the configuration is not changed")
        change("")
        await router.said(b"the configuration is not changed: no workers")
        keys.write_text("nonsense")
        router.process.send_signal(signal.SIGHUP)
        await router.said(b"the configuration is not changed")
        keys.write_text(key_line("alice", ALICE) + key_line("bob", BOB))
        change(text(first, '[[tenants]]\nname = "bob"\nrequests_s = 0.001\n'))
        await router.said(f"joined: decode {first.id}; left: decode {second.id}".encode())
        await router.said(b"taken over at the next start only: client_keepalive_s")

        async def is_limited() -> bool:
            assert "401" not in await site.used(ALICE)
            return "429" in await site.used(BOB)

        await until(is_limited)
        router.process.terminate()
        status, said = await router.ended()
        assert status == 0
        assert ALICE not in said
