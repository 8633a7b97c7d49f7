"""The admin API and SIGHUP before real router processes: every process does as one was told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pdserve.router.tenants.api_keys import key_line
from tests.router.processes.test_parent import CHAT, children, until
from tests.router.processes.test_serving import RouterProcess
from tests.support.router.harness import Connection, Response, chat_body, run
from tests.support.router.mock_worker import ANSWER, Gate, MockWorker, Received, Script, Wire, workers

ADMIN_KEY = "administrators-key-of-this-test"
ALICE, BOB = "alice-" + "a" * 20, "bob-" + "b" * 20
NEVER_S = 1000.0
"""Between two probes: a process knows of its workers what it found as it started."""
SEVERAL = 10  # requests on connections of their own: the kernel gives each of two processes some


def hang_then_answer(gate: Gate) -> Script:
    async def run(wire: Wire, request: Received) -> None:
        await gate.passed()
        await wire.body(200, ANSWER)

    return run


class Site:
    """A router of some processes, its files and its admin API."""

    def __init__(self, directory: Path, processes: int, decode: list[MockWorker]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.admin_port = free.getsockname()[1]
        self.keys = directory / "keys"
        self.file = directory / "router.toml"
        self._processes = processes
        self._decode = decode
        self.keys.write_text(key_line("alice", ALICE))
        self.configure()
        self.router: RouterProcess
        self.said = ""

    def configure(self, tenants: str = "", probe_s: float = 0.1) -> None:
        urls = json.dumps([worker.url for worker in self._decode])
        self.file.write_text(
            f"decode = {urls}\nprocesses = {self._processes}\nprobe.interval_s = {probe_s}\n"
            "probe.timeout_s = 60.0\n"
            f'access.keys_file = "{self.keys}"\n'
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
        connection = await self.router.connect()
        body = json.dumps(chat_body()).encode()
        await connection.send(CHAT, body, {"authorization": f"Bearer {key}"})
        try:
            return await connection.response()
        finally:
            connection.leave()

    async def used(self, key: str) -> set[str]:
        """By whom requests are answered, or how they are refused."""
        answers = [await self.ask(key) for _ in range(SEVERAL)]
        return {answer.headers.get("x-pdserve-decode", str(answer.status)) for answer in answers}

    async def hang_up(self) -> None:
        self.router.process.send_signal(signal.SIGHUP)

    async def two_without(self, before: set[int]) -> bool:
        """All of two processes are others than before."""
        there = await children(self.router)
        return len(there) == 2 and not before & there


@asynccontextmanager
async def site(
    directory: Path, processes: int, decode: list[MockWorker], probe_s: float = 0.1
) -> AsyncIterator[Site]:
    made = Site(directory, processes, decode)
    made.configure(probe_s=probe_s)
    made.router = await RouterProcess.start("--config", str(made.file))
    try:
        await made.router.listening()
        yield made
    finally:
        if made.router.process.returncode is None:
            made.router.process.terminate()
        made.said = (await made.router.ended())[1]


def test_every_process_does_as_one_was_told_and_so_do_those_that_come_later(tmp_path: Path) -> None:
    async def main() -> None:
        old, new = MockWorker("decode"), MockWorker("decode")
        async with workers(old, new), site(tmp_path, 2, [old]) as here:
            joined = await here.admin("POST", "/workers", {"url": new.url, "role": "decode"})
            assert joined.status == 201
            assert (await here.admin("POST", f"/workers/{old.id}/drain")).status == 200

            async def moved() -> bool:
                return await here.used(ALICE) == {new.id}

            await until(moved)
            here.keys.write_text(key_line("bob", BOB))
            assert (await here.admin("POST", "/reload")).json() == {"tenants": ["bob"]}

            async def reloaded() -> bool:
                return await here.used(BOB) == {new.id} and await here.used(ALICE) == {"401"}

            await until(reloaded)
            here.configure('[[tenants]]\nname = "bob"\nrequests_s = 0.001\n')
            before = await children(here.router)
            await here.hang_up()

            async def replaced() -> bool:
                return not before & await children(here.router)

            await until(replaced)
            assert await here.used(BOB) <= {new.id, "429"}
            assert "429" in await here.used(BOB)

    run(main(), timeout_s=240)


def test_what_is_told_of_workers_and_tenants_is_that_of_all_processes_together(tmp_path: Path) -> None:
    async def main() -> None:
        decode, gate = MockWorker("decode"), Gate()
        async with workers(decode), site(tmp_path, 2, [decode]) as here:
            decode.script(CHAT, *[hang_then_answer(gate)] * SEVERAL)
            asking = [asyncio.create_task(here.ask(ALICE)) for _ in range(SEVERAL)]
            await decode.wait_until(lambda: len(decode.got(CHAT)) == SEVERAL)
            assert (await here.admin("POST", f"/workers/{decode.id}/drain")).json()["in_flight"] == SEVERAL
            [worker] = (await here.admin("GET", "/workers")).json()["workers"]
            assert worker["in_flight"] == SEVERAL
            [alice] = (await here.admin("GET", "/tenants")).json()["tenants"]
            assert alice["running"] == alice["use"]["requests"] == SEVERAL
            before = await children(here.router)
            await here.hang_up()

            async def replaced() -> bool:  # the old ones have yet to finish
                return len(await children(here.router) - before) == 2

            await until(replaced)
            [worker] = (await here.admin("GET", "/workers")).json()["workers"]
            assert worker["in_flight"] == SEVERAL
            assert (await here.admin("DELETE", f"/workers/{decode.id}")).json()["in_flight"] == SEVERAL
            gate.open.set()
            assert {answer.body for answer in await asyncio.gather(*asking)} == {ANSWER}

    run(main(), timeout_s=240)


def test_no_number_is_told_that_lacks_what_a_process_has(tmp_path: Path) -> None:
    async def main() -> None:
        decode = MockWorker("decode")
        async with workers(decode), site(tmp_path, 2, [decode]) as here:

            async def told() -> bool:
                [worker] = (await here.admin("GET", "/workers")).json()["workers"]
                return worker["in_flight"] == 0

            await until(told)
            silent = max(await children(here.router))  # the first has the admin API
            os.kill(silent, signal.SIGSTOP)
            try:
                drained = (await here.admin("POST", f"/workers/{decode.id}/drain")).json()
                assert drained == {"id": decode.id, "draining": True, "in_flight": None}
                [worker] = (await here.admin("GET", "/workers")).json()["workers"]
                assert (worker["draining"], worker["in_flight"]) == (True, None)
                assert (await here.admin("GET", "/tenants")).error["message"].startswith("Not every process")
            finally:
                os.kill(silent, signal.SIGCONT)
            await until(told)

    run(main(), timeout_s=240)


def test_a_process_that_comes_later_begins_with_the_fleet_of_the_others(tmp_path: Path) -> None:
    async def main() -> None:
        drained, joined = MockWorker("decode"), MockWorker("decode")
        async with workers(drained, joined), site(tmp_path, 2, [drained]) as here:
            await here.admin("POST", "/workers", {"url": joined.url, "role": "decode"})
            await here.admin("POST", f"/workers/{drained.id}/drain")

            async def moved() -> bool:
                return await here.used(ALICE) == {joined.id}

            await until(moved)
            here.configure(probe_s=NEVER_S)
            before = await children(here.router)
            await here.hang_up()
            while not await here.two_without(before):
                assert await here.used(ALICE) == {joined.id}
            before = await children(here.router)
            for victim in before:
                os.kill(victim, signal.SIGKILL)

            async def restarted() -> bool:
                return await here.two_without(before)

            await until(restarted)
            assert await here.used(ALICE) == {joined.id}

    run(main(), timeout_s=240)


def test_what_is_done_to_the_fleet_while_a_process_starts_reaches_it_too(tmp_path: Path) -> None:
    async def main() -> None:
        kept, drained = MockWorker("decode"), MockWorker("decode")
        gate = Gate()

        async def held(wire: Wire, request: Received) -> None:
            await gate.passed()
            await wire.json(200, {"ready": True})

        async with workers(kept, drained), site(tmp_path, 2, [kept, drained], NEVER_S) as here:
            before = await children(here.router)
            kept.script("/pd/ready", held)
            await here.hang_up()
            await gate.reached.wait()
            assert (await here.admin("POST", f"/workers/{drained.id}/drain")).status == 200
            gate.open.set()

            async def replaced() -> bool:
                return await here.two_without(before)

            await until(replaced)
            assert await here.used(ALICE) == {kept.id}

    run(main(), timeout_s=240)


def test_sighup_takes_over_keys_and_tenants_and_nothing_of_what_is_wrong(tmp_path: Path) -> None:
    async def main() -> None:
        decode = MockWorker("decode")
        async with workers(decode), site(tmp_path, 1, [decode]) as here:
            here.keys.write_text("nonsense")
            await here.hang_up()
            assert await here.used(ALICE) == {decode.id}
            here.keys.write_text(key_line("bob", BOB))
            here.configure('[[tenants]]\nname = "bob"\nrequests_s = 0.001\n')
            await here.hang_up()

            async def reloaded() -> bool:
                return await here.used(ALICE) == {"401"} and "429" in await here.used(BOB)

            await until(reloaded)
        assert "the API keys are not changed" in here.said
        assert ALICE not in here.said

    run(main(), timeout_s=120)
