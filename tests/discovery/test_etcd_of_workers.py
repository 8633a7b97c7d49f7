"""Workers that a router finds in a real etcd."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdserve.discovery import etcd as discovery
from pdserve.discovery.config import WORKERS, WorkerEtcdConfig
from pdserve.discovery.etcd import EtcdMembership
from pdserve.discovery.workers import Registration, worker_key
from pdserve.errors import ConfigError
from pdserve.router.config.limits import Probe
from pdserve.router.config.router import RouterConfig
from pdserve.router.config.tenants import Access
from tests.support.etcd_server import EtcdServer, encoded
from tests.support.router.harness import PATIENT, Harness, routed
from tests.support.router.mock_worker import ANSWER, MockWorker, workers

pytestmark = pytest.mark.timeout(120)
WAIT_S = 20.0  # 2 s, for a machine that has more to do


def settings(etcd: EtcdServer) -> WorkerEtcdConfig:
    return WorkerEtcdConfig(endpoints=[etcd.url])


@asynccontextmanager
async def watching(etcd: EtcdServer, **more: Any) -> AsyncIterator[Harness]:
    """A router that knows of no worker but by etcd."""
    more = {"min_prefill_tokens": 0, "deadlines": PATIENT} | more  # short prompts, too, have both stages
    config = RouterConfig(etcd=settings(etcd), probe=Probe(interval_s=0.1), **more)
    async with routed(config) as harness:
        yield harness


def test_a_worker_keeps_its_key_though_the_task_for_it_ended_by_a_bug(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs: list[int] = []
    again = threading.Event()

    async def run(self: EtcdMembership) -> None:
        runs.append(1)
        if len(runs) == 1:
            raise RuntimeError("bug")
        again.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(EtcdMembership, "run", run)
    config = WorkerEtcdConfig(endpoints=["http://127.0.0.1:1"])
    registration = Registration(config, "decode", "http://worker:1", "")
    registration.start()
    try:
        assert again.wait(WAIT_S)
    finally:
        registration.stop()
    assert "is repeated" in caplog.text


@asynccontextmanager
async def registered(etcd: EtcdServer, worker: MockWorker, token: str = "") -> AsyncIterator[None]:
    registration = Registration(settings(etcd), worker.role, worker.url, token)
    registration.start()
    try:
        yield
    finally:
        await asyncio.to_thread(registration.stop)


TOKEN = "the-cluster-token-of-this-test"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - others change it
            await asyncio.sleep(0.01)


def ready(harness: Harness) -> set[str]:
    return {worker.id for worker in harness.router.fleet.workers if worker.ready}


def register(etcd: EtcdServer, worker: MockWorker) -> None:
    """By hand; it stays."""
    etcd.put(f"/pdserve/pool/workers/{worker.role}/{worker.id}", json.dumps({"address": worker.url}))


async def test_workers_are_used_once_they_register_and_gone_once_they_stop(etcd: EtcdServer) -> None:
    prefill, first, second = MockWorker("prefill"), MockWorker("decode"), MockWorker("decode")
    async with workers(prefill, first, second), registered(etcd, first), watching(etcd) as harness:
        assert (await harness.chat()).headers["x-pdserve-decode"] == first.id  # known from the start
        async with registered(etcd, prefill), registered(etcd, second):
            await until(lambda: ready(harness) == {prefill.id, first.id, second.id})
            assert (await harness.chat()).headers["x-pdserve-prefill"] == prefill.id
        await until(lambda: set(harness.router.fleet.by_id) == {first.id})
        assert (await harness.chat()).body == ANSWER


async def test_a_router_keeps_its_fleet_while_etcd_is_away_and_when_it_comes_back_empty(
    etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(discovery, "LEASE_S", 4)
    worker, lost, late = [MockWorker("agg") for _ in range(3)]
    async with workers(worker, lost, late), watching(etcd) as harness:
        known = harness.router.fleet.by_id
        for there in (worker, lost):
            register(etcd, there)
        await until(lambda: ready(harness) == {worker.id, lost.id})
        etcd.kill()
        await until(lambda: "who watches workers: going on without etcd" in caplog.text)
        assert (await harness.chat()).body == ANSWER
        etcd.wipe()
        await asyncio.to_thread(etcd.start)
        register(etcd, late)
        await until(lambda: late.id in known)
        assert worker.id in known  # though its key is lost
        register(etcd, worker)
        await until(lambda: lost.id not in known)  # both keys were missed at once
        assert set(known) == {worker.id, late.id}


async def test_nonsense_there_keeps_no_worker_out(etcd: EtcdServer) -> None:
    good, listed = MockWorker("decode"), MockWorker("decode")
    async with workers(good, listed):
        for key, address in (
            ("decode/x", "ftp://x:1"),
            ("boss/y", "http://y:1"),
            (f"prefill/{listed.id}", listed.url),  # the configuration has it as another's role
        ):
            etcd.put(f"/pdserve/pool/workers/{key}", json.dumps({"address": address}))
        etcd.put("/pdserve/pool/workers/decode/z", "garbage")
        etcd.put("/pdserve/pool/nodes/n", json.dumps({"address": "tcp:n:1"}))
        async with watching(etcd, decode=(listed.url,)) as harness:
            async with registered(etcd, good):
                await until(lambda: ready(harness) == {good.id, listed.id})
            await until(lambda: set(harness.router.fleet.by_id) == {listed.id})


async def test_a_router_starts_while_etcd_is_away(etcd: EtcdServer) -> None:
    worker = MockWorker("agg")
    etcd.kill()
    async with workers(worker), watching(etcd) as harness:
        assert (await harness.chat()).status in (404, 503)
        await asyncio.to_thread(etcd.start)
        async with registered(etcd, worker):
            await until(lambda: ready(harness) == {worker.id})


@pytest.mark.parametrize("url", ["http://0.0.0.0:1", "ftp://h:1", "h:1", "http://h:1/v1"])
def test_an_address_that_no_router_can_use_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="advertise"):
        worker_key("agg", url)


async def test_a_worker_that_is_not_signed_with_the_cluster_token_is_never_asked_for_anything(
    etcd: EtcdServer,
) -> None:
    """Whoever may write to etcd would get the token otherwise, and prompts."""
    stranger, other, own = [MockWorker("agg") for _ in range(3)]
    moved = MockWorker("prefill")
    async with (
        workers(stranger, other, own, moved),
        registered(etcd, other, "another-token-of-this-length"),
        registered(etcd, own, TOKEN),
    ):
        signed = f"/pdserve/pool/workers/agg/{own.id}"
        forged = json.dumps({"address": stranger.url})
        register(etcd, stranger)
        async with registered(etcd, moved, TOKEN):
            await until(lambda: len(etcd.keys("/pdserve/pool/workers/")) == 4)
            value = etcd.value(f"/pdserve/pool/workers/prefill/{moved.id}")
        etcd.put(f"/pdserve/pool/workers/decode/{moved.id}", value)  # good for no other role
        await until(lambda: len(etcd.keys("/pdserve/pool/workers/")) == 4)
        async with watching(etcd, access=Access(cluster_token=TOKEN)) as harness:
            await until(lambda: ready(harness) == {own.id})
            assert (await harness.chat()).body == ANSWER
            etcd.put(signed, forged)
            await until(lambda: "signature" in etcd.value(signed))  # its owner writes it anew
            etcd.put("/pdserve/pool/workers/agg/127.0.0.1:1", forged)
            assert (await harness.chat()).body == ANSWER
            assert set(harness.router.fleet.by_id) == {own.id}
    assert stranger.requests == other.requests == moved.requests == []


async def test_a_worker_watches_its_own_key_alone_and_writes_it_again(etcd: EtcdServer) -> None:
    own = worker_key("decode", "http://10.0.0.1:30000")
    seen: list[set[str]] = []
    membership = EtcdMembership(
        settings(etcd),
        "pool",
        own,
        lambda found: seen.append({member.node for member in found}),
        kind=WORKERS,
        alone=True,
    )
    register(etcd, MockWorker("prefill"))
    task = asyncio.create_task(membership.run())
    try:
        await until(lambda: bool(seen))
        etcd.put("/pdserve/pool/workers/decode/10.0.0.2:30000", '{"address": "http://10.0.0.2:30000"}')
        etcd.post("kv/deleterange", {"key": encoded(f"/pdserve/pool/workers/{own.node}")})
        await until(lambda: len(seen) > 1)
        assert all(one == {own.node} for one in seen)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await membership.close()


async def test_a_list_has_all_of_ten_thousand_workers(etcd: EtcdServer) -> None:
    urls = [f"http://10.0.{i >> 8}.{i & 255}:30000" for i in range(10_000)]
    at_once = 100  # etcd takes 128
    for first in range(0, len(urls), at_once):
        keys = {
            url: f"/pdserve/pool/workers/{worker_key('decode', url).node}" for url in urls[first:][:at_once]
        }
        puts = [
            {"key": encoded(key), "value": encoded(json.dumps({"address": url}))} for url, key in keys.items()
        ]
        etcd.post("kv/txn", {"success": [{"requestPut": put} for put in puts]})
    membership = EtcdMembership(settings(etcd), "pool", None, lambda _: None, kind=WORKERS)
    try:
        assert {member.address for member in await membership.nodes()} == set(urls)
    finally:
        await membership.close()
