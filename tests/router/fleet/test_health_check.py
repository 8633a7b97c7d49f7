"""Probes: what each outcome says of a worker, and a prober that fails."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdserve.router.app import lifespan
from pdserve.router.config.limits import Probe
from pdserve.router.fleet.health_check import Prober
from pdserve.router.fleet.worker import Worker
from pdserve.router.http.worker_connection import Upstream
from tests.support.router.harness import Harness, before, disagg
from tests.support.router.mock_worker import MockWorker

NEVER = Probe(interval_s=3600.0)
OFTEN = Probe(interval_s=0.01)


@asynccontextmanager
async def prober_of(harness: Harness) -> AsyncIterator[tuple[Prober, tuple[Worker, ...]]]:
    """A prober of its own, and the workers."""
    router = harness.router
    prober = Prober(NEVER, router.fleet, router.upstream, Upstream(router.config.limits), harness.stats)
    yield prober, harness.router.fleet.workers
    await prober.close()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    ],
)
async def test_a_fault_of_this_machine_says_nothing_of_the_workers(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with disagg(decode=2, probe=NEVER) as (harness, _, _), prober_of(harness) as (prober, workers):
        loop = asyncio.get_running_loop()
        connect = loop.create_connection

        async def failing(made: Any, host: str, port: int, **more: Any) -> Any:
            if port != harness.port:
                raise type(error)(*error.args)
            return await connect(made, host, port, **more)

        monkeypatch.setattr(loop, "create_connection", failing)
        for _ in range(NEVER.failures_to_down + 1):
            for worker in workers:
                await prober.probe(worker, asks_info=False)
        assert all(worker.ready for worker in workers)
        for _ in range(4):
            answered = await harness.chat()
            assert answered.status in (200, 503)
        assert all(worker.circuit.failures == 0 for worker in workers)
        monkeypatch.undo()
        assert (await harness.chat()).status == 200


async def test_a_worker_whose_info_has_changed_is_asked_for_it_at_the_next_probe() -> None:
    async with disagg(probe=NEVER) as (harness, prefill, _), prober_of(harness) as (prober, (worker, _)):
        prefill[0].info |= {"sglang_version": "0.5.24"}
        await prober.probe(worker, asks_info=False)
        assert worker.info is not None
        assert worker.info.sglang_version == "0.5.23", "a worker that says nothing of it is asked seldom"
        prefill[0].info |= {"info_tag": "b"}
        await prober.probe(worker, asks_info=False)
        assert (worker.info.sglang_version, worker.info.info_tag) == ("0.5.24", "b")


async def test_a_closed_port_downs_its_worker_at_once_and_a_name_without_an_address_after_several_probes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def failing(*given: Any, **more: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async with disagg(probe=NEVER) as (harness, [closed], _), prober_of(harness) as (prober, probed):
        at_once, later = probed
        await closed.stop()
        await prober.probe(at_once, asks_info=False)
        assert not at_once.ready
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", failing)
        seen = []
        for _ in range(NEVER.failures_to_down):
            await prober.probe(later, asks_info=False)
            seen.append(later.ready)
        assert seen == [True] * (NEVER.failures_to_down - 1) + [False]


async def test_probes_that_fail_by_a_bug_are_counted_and_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifespan, "RESTART_S", 0.01)
    failures = iter([True, True])
    probe = Prober.probe

    async def failing(self: Prober, worker: Any, *, asks_info: bool) -> None:
        if next(failures, False):
            raise AssertionError("a bug")
        await probe(self, worker, asks_info=asks_info)

    monkeypatch.setattr(Prober, "probe", failing)
    decode = MockWorker("decode")
    async with before(decode, probe=OFTEN) as harness:
        await harness.until(lambda: harness.stats.task_failures["probes"] > 0)
        decode.ready = False
        await harness.until(lambda: not harness.router.fleet.workers[0].ready)
        assert b'task_failures_total{task="probes"}' in (await harness.get("/metrics")).body
