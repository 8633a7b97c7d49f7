"""`/v1/realtime` through the router: who may, which bytes go where, and what ends it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pdserve.router.app.realtime import BYTES_PER_TOKEN
from pdserve.router.config.tenants import Access, Tenant
from pdserve.router.tenants.api_keys import key_line
from pdserve.router.tenants.cache_salt import SALT_HEADER
from tests.support.router.harness import PATIENT, Connection, Harness, Response, before
from tests.support.router.mock_worker import MockWorker, Received

REALTIME = "/v1/realtime"
ALICE = "alice-" + "a" * 20
BY_ALICE = {"authorization": f"Bearer {ALICE}"}
HELLO = b"\x81\x05hello"
"""A WebSocket's frame with a text. Its last two bytes begin no other."""
CLOSING = b"\x88\x00"
SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\n\r\n"
ASKING = {
    "connection": "Upgrade",
    "upgrade": "websocket",
    "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    "sec-websocket-version": "13",
    "sec-websocket-extensions": "permessage-deflate",
    "sec-websocket-protocol": "realtime, openai-insecure-api-key.secret",
}


class Hearing(MockWorker):
    """A worker that says every byte back, until it gets `bye`. The frames of WebSockets are nothing to it."""

    def __init__(self, head: bytes = SWITCHED, **info: Any) -> None:
        super().__init__("decode", **info)
        self.head = head
        self.heard = b""
        self.left = asyncio.Event()

    async def _answer(
        self, request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if request.path != REALTIME:
            await super()._answer(request, reader, writer)
            return
        writer.write(self.head)
        try:
            while piece := await reader.read(1 << 16):
                self.heard += piece
                writer.write(piece)
                await writer.drain()
                if self.heard.endswith(b"bye"):
                    break
        finally:
            self.left.set()
        writer.close()
        await writer.wait_closed()


async def asked(harness: Harness, target: str = REALTIME, **headers: str) -> tuple[Connection, Response]:
    """A client, and the head that it got."""
    client = await harness.connect()
    named = {name.replace("_", "-"): said for name, said in headers.items()}
    given = "".join(f"{name}: {said}\r\n" for name, said in (ASKING | named).items() if said)
    client.writer.write(f"GET {target} HTTP/1.1\r\nhost: test\r\n{given}\r\n".encode())
    return client, await client.head()


@asynccontextmanager
async def hearing(worker: Hearing, **config: Any) -> AsyncIterator[Harness]:
    async with before(worker, **config) as harness:
        yield harness
        harness.hang_up()
        await harness.until(lambda: harness.router.realtime._sessions == 0)


@pytest.fixture
def keyed(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "keys").write_text(key_line("alice", ALICE))
    tenants = (Tenant(name="alice", concurrency=1),)
    return {"access": Access(keys_file=tmp_path / "keys"), "tenants": tenants}


async def test_bytes_go_both_ways_until_the_worker_ends_it() -> None:
    worker = Hearing()
    async with hearing(worker) as harness:
        client, head = await asked(harness, f"{REALTIME}?model=m&intent=transcription")
        assert head.status == 101
        for piece in (b"one", b"x" * 300_000, b"bye"):
            client.writer.write(piece)
            assert await client.reader.readexactly(len(piece)) == piece
        assert await client.reader.read() == b""
        [got] = worker.got(REALTIME)
        assert got.target == REALTIME
        assert {name: got.headers.get(name) for name in ASKING} == ASKING | {
            "sec-websocket-extensions": None,
            "sec-websocket-protocol": None,
        }


async def test_what_comes_behind_the_head_is_not_lost() -> None:
    worker = Hearing()
    async with hearing(worker) as harness:
        client = await harness.connect()
        given = "".join(f"{name}: {said}\r\n" for name, said in ASKING.items())
        client.writer.write(f"GET {REALTIME} HTTP/1.1\r\nhost: test\r\n{given}\r\nat once bye".encode())
        assert (await client.head()).status == 101
        assert await client.reader.read() == b"at once bye"


async def test_the_worker_is_let_go_when_the_client_leaves() -> None:
    worker = Hearing()
    async with hearing(worker) as harness:
        client, _ = await asked(harness)
        [there] = harness.router.fleet.workers
        assert there.in_flight == 1
        client.leave()
        await worker.left.wait()
        await harness.until(lambda: there.in_flight == 0)


async def test_a_worker_that_takes_no_websocket_is_an_error_and_gets_nothing_more() -> None:
    for head in (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", b"HTTP/1.1 101", b""):
        worker = Hearing(head)
        async with hearing(worker, deadlines=replace(PATIENT, first_byte_s=0.05)) as harness:
            client, said = await asked(harness)
            assert said.status == 502
            client.writer.write(b"POST /flush_cache HTTP/1.1\r\n\r\n")
            await worker.left.wait()
            assert worker.heard == b""


async def test_the_next_worker_gets_it_where_one_is_gone() -> None:
    workers = [Hearing() for _ in range(3)]
    async with before(*workers) as harness:
        for one in workers[:2]:
            await one.stop()
        client, head = await asked(harness)
        assert head.status == 101
        client.leave()
        await workers[2].left.wait()
        await harness.until(lambda: harness.router.realtime._sessions == 0)


async def test_a_key_is_needed_where_there_are_keys_and_tenants_are_kept_apart(keyed: dict[str, Any]) -> None:
    worker = Hearing(takes_salt_header=True)
    async with hearing(worker, **keyed) as harness:
        _, refused = await asked(harness)
        assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
        client, head = await asked(harness, **BY_ALICE)
        assert head.status == 101
        [got] = worker.got(REALTIME)
        assert got.headers[SALT_HEADER.decode()] == '"tenant/alice"'
        assert "authorization" not in got.headers
        assert (await asked(harness, **BY_ALICE))[1].status == 429, "one at a time"
        client.leave()
        await worker.left.wait()
        await harness.until(lambda: harness.router.realtime._sessions == 0)
        assert (await asked(harness, **BY_ALICE))[1].status == 101


async def test_a_worker_that_keeps_no_tenants_apart_gets_none(keyed: dict[str, Any]) -> None:
    worker = Hearing()
    async with hearing(worker, **keyed) as harness:
        assert (await asked(harness, **BY_ALICE))[1].status == 503
        assert worker.got(REALTIME) == []


async def test_a_tenant_pays_for_what_it_sends_and_waits_where_it_has_a_rate(keyed: dict[str, Any]) -> None:
    keyed["tenants"] = (Tenant(name="alice", tokens_min=100),)
    worker = Hearing(takes_salt_header=True)
    async with hearing(worker, **keyed) as harness:
        client, _ = await asked(harness, **BY_ALICE)
        [tenant] = [one for one in harness.router.gate.tenants.all if one.name == "alice"]
        first = b"x" * (60 * BYTES_PER_TOKEN)
        client.writer.write(first)
        assert await client.reader.readexactly(len(first)) == first
        assert tenant.use.prompt_tokens == 60
        client.writer.write(b"y" * (60 * BYTES_PER_TOKEN))
        await harness.until(lambda: tenant.tokens is not None and tenant.tokens.level < 0)
        assert worker.heard.count(b"y") < 60 * BYTES_PER_TOKEN


async def test_a_client_that_leaves_in_debt_leaves_nothing_behind(keyed: dict[str, Any]) -> None:
    keyed["tenants"] = (Tenant(name="alice", tokens_min=1),)
    worker = Hearing(takes_salt_header=True)
    async with hearing(worker, **keyed) as harness:
        client, _ = await asked(harness, **BY_ALICE)
        [tenant] = [one for one in harness.router.gate.tenants.all if one.name == "alice"]
        client.writer.write(b"x" * (60 * BYTES_PER_TOKEN))
        await harness.until(lambda: tenant.tokens is not None and tenant.tokens.level < -50)
        client.writer.close()
        await worker.left.wait()
        await harness.until(lambda: tenant.running == 0)
        assert tenant.tokens is not None
        assert tenant.tokens.level < -50, "it owes as before"


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://test", 101),
        ("https://app.example.com", 101),
        ("https://evil.example.com", 403),
        ("null", 403),
    ],
)
async def test_pages_of_other_origins_need_to_be_let_in(origin: str, status: int) -> None:
    access = Access(cors_origins=("https://app.example.com",))
    async with hearing(Hearing(), access=access) as harness:
        assert (await asked(harness, origin=origin))[1].status == status


async def test_what_is_no_websocket_here_is_answered_as_ever() -> None:
    worker = Hearing()
    async with hearing(worker) as harness:
        assert (await asked(harness, upgrade="h2c"))[1].status == 400
        assert (await asked(harness, "/v1/models"))[1].status == 200
        assert (await asked(harness, f"{REALTIME}?model=nobody"))[1].status == 404
        assert (await harness.get(REALTIME)).status == 404
        assert worker.got(REALTIME) == []


async def test_a_session_has_an_end() -> None:
    worker = Hearing()
    async with hearing(worker, deadlines=replace(PATIENT, total_s=0.05)) as harness:
        client, head = await asked(harness)
        assert head.status == 101
        assert await client.reader.read() == b""


async def test_a_client_that_reads_nothing_is_cut_off() -> None:
    worker = Hearing()
    async with hearing(worker, deadlines=replace(PATIENT, client_read_s=0.05)) as harness:
        client, _ = await asked(harness)
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(400):
            client.writer.write(b"x" * (1 << 16))
        await worker.left.wait()
        await harness.until(lambda: harness.router.realtime._sessions == 0)


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record) for record in caplog.records if record.name == "pdserve.router.access"]


def told(harness: Harness) -> dict[str, dict[tuple[str, ...], float]]:
    """The metrics of sessions."""
    snapshot = harness.router.own_metrics()
    kept = {name: of for name, of in snapshot.values.items() if name.startswith("realtime")}
    seconds = snapshot.histograms["realtime_session_seconds"]
    return kept | {"realtime_session_seconds": {of: sum(one.counts) for of, one in seconds.items()}}


async def test_metrics_tell_by_model_what_sessions_are_open_and_how_they_ended() -> None:
    worker = Hearing()
    async with hearing(worker) as harness:
        client, _ = await asked(harness)
        client.writer.write(HELLO + HELLO)
        assert await client.reader.readexactly(2 * len(HELLO)) == 2 * HELLO
        assert told(harness) == {
            "realtime_sessions_open": {("m",): 1},
            "realtime_sessions": {},
            "realtime_messages": {("m", "client"): 2, ("m", "worker"): 2},
            "realtime_session_seconds": {},
        }
        client.writer.write(CLOSING)
        assert await client.reader.readexactly(len(CLOSING)) == CLOSING
        client.leave()
        await harness.until(lambda: harness.stats.requests[REALTIME, "101"] == 1)
        assert told(harness) == {
            "realtime_sessions_open": {("m",): 0},
            "realtime_sessions": {("m", "client"): 1},
            "realtime_messages": {("m", "client"): 2, ("m", "worker"): 2},
            "realtime_session_seconds": {("m",): 1},
        }


@pytest.mark.parametrize("by", ["client", "client-closing", "worker", "deadline", "slow", "router"])
async def test_metrics_tell_who_ended_a_session(by: str) -> None:
    deadlines = {"deadline": replace(PATIENT, total_s=0.05), "slow": replace(PATIENT, client_read_s=0.05)}
    worker = Hearing()
    async with hearing(worker, deadlines=deadlines.get(by, PATIENT)) as harness:
        client, _ = await asked(harness)
        if by == "client":
            client.leave()
        elif by == "client-closing":  # of a WebSocket's two ends, the worker's hangs up first then
            client.writer.write(CLOSING + b"bye")
        elif by == "worker":
            client.writer.write(b"bye")
        elif by == "slow":
            client.reader._transport.pause_reading()  # type: ignore[attr-defined]
            for _ in range(400):
                client.writer.write(b"b" * (1 << 16))  # as frames, parts of a message
        elif by == "router":
            [serving] = [task for task in asyncio.all_tasks() if "Realtime.serve" in repr(task)]
            serving.cancel()
        await harness.until(lambda: harness.stats.requests[REALTIME, "101"] == 1)
        assert told(harness)["realtime_sessions"] == {("m", by.partition("-")[0]): 1}
        assert told(harness)["realtime_sessions_open"] == {("m",): 0}


async def test_a_session_that_is_refused_counts_as_a_request_alone() -> None:
    async with hearing(Hearing(b""), deadlines=replace(PATIENT, first_byte_s=0.05)) as harness:
        await asked(harness)
        await asked(harness, f"{REALTIME}?model=nobody")
        assert harness.stats.requests == {(REALTIME, "502"): 1, (REALTIME, "404"): 1}
        assert not any(told(harness).values())


async def test_the_access_log_has_a_line_for_each_session(
    keyed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pdserve.router.access")
    worker = Hearing(takes_salt_header=True)
    async with hearing(worker, access_log=True, **keyed) as harness:
        client, _ = await asked(harness, **BY_ALICE, x_request_id="mine")
        client.writer.write(HELLO)
        await client.reader.readexactly(len(HELLO))
        client.writer.write(CLOSING + b"bye")
        assert await client.reader.read() == CLOSING + b"bye"
        await asked(harness)
        await harness.until(lambda: len(lines(caplog)) == 2)
    served, refused = lines(caplog)
    assert (served["route"], served["status"], served["tenant"], served["model"]) == (
        REALTIME,
        101,
        "alice",
        "m",
    )
    assert (served["messages_from_client"], served["messages_from_worker"]) == (1, 1)
    assert (served["x-pdserve-decode"], served["ended_by"]) == (worker.id, "client")
    assert 0 <= served["first_byte_s"] <= served["seconds"]
    assert (refused["status"], refused["tenant"], refused["model"]) == (401, "", "")
    assert "ended_by" not in refused
    assert "hello" not in str(served)
    assert ALICE not in str(served)
