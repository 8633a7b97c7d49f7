"""Real router processes behind one port. What their parent does in all cases is in test_prefork.py, what they
tell each other in test_gossip.py. To start some takes seconds, so each test does much with those that it has.
"""

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
from tests.support.command import pdserve_here
from tests.support.processes import free_ports
from tests.support.router.harness import Connection, Response, chat_body
from tests.support.router.mock_worker import ANSWER, EVENTS, Gate, MockWorker, held, stream, workers
from tests.support.router.process import CHAT, RouterProcess, routing, until
from tests.support.router.redis_server import redis_server
from tests.support.router.tenants import ALICE, BOB, by

SESSION = {"x-session-id": "s"}
ADMIN_KEY = "administrators-key-of-this-test"
SEVERAL = 10
ONCE = "probe.interval_s = 1000.0\nprobe.timeout_s = 60.0\n"
"""A process knows of its workers what it found as it started."""


class Site:
    """The files of a router with API keys, and its admin API."""

    def __init__(self, directory: Path, decode: list[MockWorker]) -> None:
        [self.admin_port] = free_ports(1)
        self.file, self.keys = directory / "router.toml", directory / "keys"
        self._decode = decode
        self.keys.write_text(key_line("alice", ALICE))
        self.router: RouterProcess

    def text(self, probe: str = "probe.interval_s = 0.1\n") -> str:
        return (
            f"decode = {json.dumps([worker.url for worker in self._decode])}\nprocesses = 2\n{probe}"
            f'access = {{ keys_file = "{self.keys}", show_load = true }}\n'
            f'[admin]\nport = {self.admin_port}\nkey = "{ADMIN_KEY}"\n'
            f'[[tenants]]\nname = "*"\nconcurrency = {SEVERAL}\n'
        )

    async def admin(self, method: str, path: str, body: Any = None) -> Response:
        connection = Connection(*await asyncio.open_connection("127.0.0.1", self.admin_port))
        data = json.dumps(body).encode() if body is not None else b""
        await connection.send(path, data, by(ADMIN_KEY), method)
        try:
            return await connection.response()
        finally:
            connection.leave()

    async def used(self, key: str) -> set[str]:
        """By whom requests are answered, or how they are refused, by any process."""
        answers = [await self.router.ask(headers=by(key)) for _ in range(SEVERAL)]
        return {answer.headers.get("x-pdserve-decode", str(answer.status)) for answer in answers}

    async def until_used(self, key: str, expected: set[str]) -> None:
        async def is_used() -> bool:
            return await self.used(key) == expected

        await until(is_used)


@pytest.mark.timeout(200)
async def test_processes_do_as_one_was_told_and_tell_what_all_do_and_end_with_their_parent(
    tmp_path: Path,
) -> None:
    old, new, third = (MockWorker("decode") for _ in range(3))
    site = Site(tmp_path, [old, third])
    async with workers(old, new, third), routing(site.file, site.text()) as router:
        site.router = router
        joined = await site.admin("POST", "/workers", {"url": new.url, "role": "decode"})
        assert joined.status == 201
        for worker in (old, third):
            assert (await site.admin("POST", f"/workers/{worker.id}/drain")).status == 200
        await site.until_used(ALICE, {new.id})
        await told_of_all(site, new)

        site.keys.write_text(key_line("bob", BOB))
        assert (await site.admin("POST", "/reload")).json() == {"tenants": ["bob"]}
        await site.until_used(ALICE, {"401"})
        await site.until_used(BOB, {new.id})
        before = router.children
        site.file.write_text(site.text(ONCE))
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

        last = router.children
        router.process.kill()

        async def are_gone() -> bool:
            return not any(Path(f"/proc/{pid}").exists() for pid in last)  # noqa: ASYNC240

        await until(are_gone)
        await router.ended()


async def told_of_all(site: Site, worker: MockWorker) -> None:
    """A tenant's limit holds over all processes. What is told of workers and tenants is that of all of them,
    or is not told.
    """
    router, gate = site.router, Gate()
    [alice] = (await site.admin("GET", "/tenants")).json()["tenants"]
    admitted = alice["use"]["requests"]
    worker.script(CHAT, *[held(gate)] * 2 * SEVERAL)
    asking = [asyncio.create_task(router.ask(headers=by(ALICE))) for _ in range(2 * SEVERAL)]
    before = len(worker.got(CHAT))
    await worker.wait_until(lambda: len(worker.got(CHAT)) == before + SEVERAL)
    assert (await site.admin("POST", f"/workers/{worker.id}/undrain")).json()["in_flight"] == SEVERAL

    async def are_counted() -> bool:
        [alice] = (await site.admin("GET", "/tenants")).json()["tenants"]
        assert alice["use"]["requests"] == admitted + SEVERAL
        return (alice["running"], alice["waiting"]) == (SEVERAL, SEVERAL)

    await until(are_counted)

    async def found() -> Any:
        said = (await site.admin("GET", "/workers")).json()["workers"]
        return next(one["in_flight"] for one in said if one["id"] == worker.id)

    assert await found() == SEVERAL
    silent = max(router.children)  # the first has the admin API
    os.kill(silent, signal.SIGSTOP)
    try:
        assert await found() is None
        assert (await site.admin("GET", "/tenants")).error["message"].startswith("Not every process")
    finally:
        os.kill(silent, signal.SIGCONT)
    gate.open.set()
    assert {answer.body for answer in await asyncio.gather(*asking)} == {ANSWER}


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.timeout(200)
async def test_a_reload_under_load_refuses_and_fails_nothing_and_what_is_wrong_changes_nothing(
    tmp_path: Path, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    first, second = MockWorker("decode"), MockWorker("decode")
    site = Site(tmp_path, [])

    def text(worker: MockWorker) -> str:
        return (
            f'decode = ["{worker.url}"]\nprocesses = {processes}\nstop_grace_s = 0.1\n'
            f'access = {{ keys_file = "{site.keys}", show_load = true }}\n'
        )

    async with workers(first, second), routing(site.file, text(first)) as router:
        site.router = router
        if processes == 1:
            check_memory(router)
        else:
            await one_session(router, tmp_path)
        stop, answered = asyncio.Event(), 0

        async def load() -> None:
            nonlocal answered
            kept = await router.connect()
            while not stop.is_set():
                assert (await router.ask(headers=by(ALICE))).body == ANSWER
                try:
                    await kept.send(CHAT, json.dumps(chat_body()).encode(), by(ALICE))
                    answer = await kept.response()
                except (OSError, asyncio.IncompleteReadError):  # kept idle until its process ended
                    kept = await router.connect()
                    continue
                assert answer.body == ANSWER
                if answer.headers.get("connection") == "close":
                    kept = await router.connect()
                answered += 1

        async def reloaded(content: str, said: str) -> None:
            site.file.write_text(content)
            router.process.send_signal(signal.SIGHUP)
            await router.said(said.encode())

        gate = Gate()
        first.script(CHAT, stream(EVENTS, gate, gate_after=1))
        client = await router.connect()
        await client.send(CHAT, json.dumps(chat_body(stream=True)).encode(), by(ALICE))
        assert (await client.head()).status == 200
        loading = [asyncio.create_task(load()) for _ in range(4)]
        await reloaded(text(second), "have the new configuration")
        for wrong in (
            f'decode = ["{first.url}"\n',
            "",
            text(second).replace("processes = ", "processes = 1"),
        ):
            await reloaded(wrong, "the configuration is not changed")
        site.keys.write_text("nonsense")
        await reloaded(text(second), "the configuration is not changed")
        assert await site.used(ALICE) == {second.id}
        gate.open.set()  # long after `stop_grace_s` the stream goes on in the process that was replaced
        events = b""
        while data := await client.chunk():
            events += data
        assert events.replace(KEEP_ALIVE, b"") == b"".join(EVENTS)
        site.keys.write_text(key_line("alice", ALICE) + key_line("bob", BOB))
        limited = '[[tenants]]\nname = "bob"\nrequests_s = 0.001\n'
        before = router.children
        await reloaded(text(first) + limited, "have the new configuration")
        await router.replaced(before, processes)
        assert await site.used(ALICE) == {first.id}
        assert "429" in await site.used(BOB)
        stop.set()
        await asyncio.gather(*loading)
        assert answered > 10


def check_memory(router: RouterProcess) -> None:
    """What a router of one process takes in all, which its users pay before the first request."""
    pids = [router.process.pid, *router.children]
    lines = [
        line.split() for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().split("\n")
    ]
    rss, pss = (sum(int(line[1]) for line in lines if line[:1] == [of]) / 1024 for of in ("Rss:", "Pss:"))
    assert len(pids) == 2
    assert rss < 100
    assert pss < 70


async def one_session(router: RouterProcess, directory: Path) -> None:
    """A session goes on in whichever process has its next turn. Nothing is between them but a directory."""
    [runtime] = directory.glob("pdserve-router-*")  # noqa: ASYNC240
    files = MetricsFiles(runtime)
    headers = (await router.ask(headers=SESSION | by(ALICE))).headers
    home = headers["x-pdserve-decode"]

    async def all_have_had_turns() -> bool:
        await asyncio.sleep(6 * REPORT_S)  # a client reads, or a tool runs; the machine may be busy
        headers = (await router.ask(headers=SESSION | by(ALICE))).headers
        assert headers["x-pdserve-decode"] == home
        assert "decode=session" in headers["x-pdserve-plan"]
        read = [files.read(name) for name in files.stamps(but="")]
        return min(one.total("requests") for one in read if one is not None) >= 4

    await until(all_have_had_turns)


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

        async def left(router: RouterProcess) -> int:
            return int((await router.ask(headers=by(ALICE))).headers["x-ratelimit-remaining-requests"])

        async def is_charged() -> bool:
            await asyncio.gather(*(first.ask(headers=by(ALICE)) for _ in range(10)))
            await asyncio.sleep(1.5 * REPORT_S)
            return await left(second) < 12

        await until(is_charged)
        home = (await first.ask(headers=by(ALICE) | SESSION)).headers["x-pdserve-decode"]

        async def is_known() -> bool:
            headers = (await second.ask(headers=by(ALICE) | SESSION)).headers
            assert headers["x-pdserve-decode"] == home
            return "decode=session" in headers["x-pdserve-plan"]

        await until(is_known)
        os.kill(redis.process.pid, signal.SIGSTOP)

        async def is_apart() -> bool:
            assert (await first.ask(headers=by(ALICE))).status in (200, 429)
            return "50 %" in (await second.said(rb"holds .* of the"))[0].decode()

        await until(is_apart)
        os.kill(redis.process.pid, signal.SIGCONT)
        await second.said(rb"Redis is back")


# --- the start and the stop


@pytest.mark.timeout(60)
async def test_a_router_that_stops_ends_its_streams_and_answers_once_more_on_each_connection() -> None:
    linger = (
        "from pdserve.router.http import client_connection; client_connection.LINGER_S = 8.0; "
        "from pdserve.cli import main; main()"
    )
    decode = MockWorker("decode")
    async with workers(decode):
        router = await RouterProcess.start("--decode", decode.url, program=linger)
        await router.listening()
        gate = Gate()
        decode.script(CHAT, stream(EVENTS, gate, gate_after=1))
        streaming = await router.start_streaming()
        idle, new, busy = [await router.connect() for _ in range(3)]
        body = json.dumps(chat_body()).encode()
        for client in (idle, busy):
            await client.send(CHAT, body)
            assert "connection" not in (await client.response()).headers
        router.process.send_signal(signal.SIGTERM)
        await router.refuses()
        for client in (busy, new):
            await client.send(CHAT, body)
        gate.open.set()
        rest = b""
        while data := await streaming.chunk():
            rest += data
        assert rest == b"".join(EVENTS[1:])
        await streaming.send(CHAT, body)
        for client in (busy, new, streaming):
            last = await client.response()
            assert (last.body, last.headers["connection"]) == (ANSWER, "close")
            assert await client.reader.read() == b""
        assert await idle.reader.read() == b""
        assert (await router.ended())[0] == 0


@pytest.mark.timeout(90)
async def test_a_router_says_what_it_does_raises_its_limit_of_files_and_gives_notice_of_its_stop() -> None:
    """And a stream that outlasts its grace ends in an error event."""
    lowered = (
        "import resource; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard)); "
        "from pdserve.cli import main; main()"
    )
    decode = MockWorker("decode")
    async with workers(decode):
        options = ("--host", "0.0.0.0", "--insecure", "--processes", "2", "--stop-notice-s", "3600")
        router = await RouterProcess.start(
            "--decode", decode.url, *options, "--stop-grace-s", "0.2", program=lowered
        )
        await router.said(rb"insecure, no API keys: everyone who reaches 0.0.0.0")
        await router.listening()
        for child in router.children:
            lines = Path(f"/proc/{child}/limits").read_text().splitlines()  # noqa: ASYNC240
            [limit] = [line.split() for line in lines if line.startswith("Max open files")]
            assert limit[3] == limit[4]
        assert (await router.ask("/ready")).status == 200
        decode.script(CHAT, stream(EVENTS, Gate(), gate_after=1))
        client = await router.start_streaming()
        router.process.send_signal(signal.SIGTERM)

        async def says_so() -> bool:
            answers = [await router.ask("/ready") for _ in range(8)]
            return all(answer.status == 503 for answer in answers)

        await until(says_so)
        assert "the router is stopping" in (await router.ask("/ready")).json()["degraded"]
        assert (await router.ask()).body == ANSWER
        router.process.send_signal(signal.SIGTERM)  # a second one is obeyed at once
        last = await client.chunk()
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "router_stopping"
        assert await client.chunk() == b""
        assert (await router.ended())[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--decode", "nonsense"], "http://HOST:PORT"),
        (["--decode", "http://127.0.0.1:1", "--session.sources", "kooky:x"], "kooky:x"),
        (["--config", "missing.toml"], "missing.toml"),
        ([], "no workers"),
        (["--decode", "http://127.0.0.1:1", "--host", "::", "--processes", "2"], "insecure = true"),
    ],
)
def test_what_cannot_be_configured_is_said_in_one_line(arguments: list[str], said: str) -> None:
    done = pdserve_here("router", *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr


@pytest.mark.timeout(60)
async def test_a_child_whose_workers_do_not_fit_ends_the_router() -> None:
    prefill, decode = MockWorker("prefill"), MockWorker("decode", page_size=64)
    async with workers(prefill, decode):
        urls = ("--prefill", prefill.url, "--decode", decode.url)
        status, said = await (await RouterProcess.start("--processes", "2", *urls)).ended()
        assert status == 1
        # named in the order in which their probes were answered
        assert "page_size (64 and 16)" in said or "page_size (16 and 64)" in said
        assert "Traceback" not in said
