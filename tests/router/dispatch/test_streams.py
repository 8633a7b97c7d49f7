"""Many streams at once."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pdserve.router.config.limits import Probe
from tests.support.router.harness import chat_body, disagg
from tests.support.router.mock_worker import EVENTS, STREAM, Gate, answer, close, hang, stream
from tests.support.router.process import RouterProcess
from tests.support.router.raw_load import Load, mock_worker, run_load

CHAT = "/v1/chat/completions"
COUNT = 200
MANY = 1000
OPEN_FILES = 8192


@pytest.mark.timeout(60)
async def test_two_hundred_streams_at_once_without_error_or_leak() -> None:
    async with disagg(prefill=2, decode=2) as (harness, prefills, decodes):
        gate = Gate()
        for decode in decodes:
            decode.script(CHAT, *[stream(EVENTS, gate, gate_after=2)] * COUNT)
        asking = [asyncio.create_task(harness.chat(stream=True, i=i)) for i in range(COUNT)]
        for decode in decodes:
            await decode.wait_until(lambda decode=decode: len(decode.requests) == COUNT // 2)
        assert [worker.in_flight for worker in harness.router.fleet.workers[2:]] == [COUNT // 2] * 2
        gate.open.set()
        responses = await asyncio.gather(*asking)
        assert {response.body for response in responses} == {STREAM}
        assert [len(prefill.requests) for prefill in prefills] == [COUNT // 2] * 2
        assert harness.stats.requests == {(CHAT, "200"): COUNT}


async def test_a_worker_whose_trial_stream_has_begun_is_given_others_before_it_ends() -> None:
    minutes = Probe(circuit_failures=1, circuit_open_s=600.0)
    async with disagg(prefill=0, decode=2, probe=minutes, decode_policy="round_robin") as (
        harness,
        _,
        decodes,
    ):
        gate = Gate()
        for decode in decodes:
            decode.script(CHAT, *[stream(EVENTS, gate, gate_after=1)] * 4)
        failed = harness.router.fleet.workers[0]
        harness.router.fleet.on_failure(failed, asyncio.get_running_loop().time() - 601.0)
        clients = [await harness.connect() for _ in range(4)]
        for client in clients:
            await client.send(CHAT, json.dumps(chat_body(stream=True)).encode())
            await client.head()
            assert await client.chunk() == EVENTS[0]
        assert [worker.in_flight for worker in harness.router.fleet.workers] == [2, 2]
        gate.open.set()
        for client in clients:
            while await client.chunk():
                pass
            client.leave()


@pytest.mark.timeout(60)
async def test_two_hundred_clients_that_leave_together() -> None:
    async with disagg() as (harness, _, [decode]):
        gate = Gate()
        decode.script(CHAT, *[stream(EVENTS, gate, gate_after=0)] * COUNT)
        asking = [asyncio.create_task(harness.chat(stream=True)) for _ in range(COUNT)]
        await decode.wait_until(lambda: len(decode.requests) == COUNT)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await decode.wait_until(lambda: decode.disconnected == COUNT)
        await harness.assert_nothing_leaked()
        assert harness.stats.client_aborts == {"decode": COUNT}


@pytest.fixture
def many_files() -> Iterator[None]:
    """Clients, router and workers are one process here: four ends of connections for each stream."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES:
        pytest.skip(f"needs {OPEN_FILES} open files, the hard limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, OPEN_FILES), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.extended
@pytest.mark.usefixtures("many_files")
@pytest.mark.timeout(240)
async def test_a_thousand_streams_again_and_again_leave_memory_and_descriptors_as_they_were(
    tmp_path: Path,
) -> None:
    options = [f"--{name}-s=120" for name in ("deadlines.connect", "deadlines.prefill", "probe.timeout")]
    load = Load(streams=MANY, seconds=0.5, chunks=3, interval_us=500_000, ramp_s=1.5, warm_up_s=0.5)
    with mock_worker("prefill", tmp_path) as prefill, mock_worker("decode", tmp_path) as decode:
        urls = [f"http://127.0.0.1:{worker.port}" for worker in (prefill, decode)]
        router = await RouterProcess.start("--prefill", urls[0], "--decode", urls[1], *options)
        await router.listening()
        process = psutil.Process(router.process.pid)
        at_rest, memory_bytes = process.num_fds(), []
        for _ in range(3):
            done, _, at_once = await run_load(load, router.port, process.num_fds)
            assert (done.errors, done.first_error) == (0, "")
            assert at_once > at_rest + MANY
            async with asyncio.timeout(60):  # connections close
                while process.num_fds() > at_rest:  # noqa: ASYNC110 - another process has no event for it
                    await asyncio.sleep(0.05)
            memory_bytes.append(process.memory_info().rss)
        assert memory_bytes[2] <= 1.1 * memory_bytes[1], memory_bytes
        router.process.terminate()
        assert (await router.ended())[0] == 0


async def test_requests_however_they_end_leave_nothing_to_the_garbage_collector() -> None:
    async with disagg(decode=2) as (harness, _, decodes):
        for decode in decodes:
            decode.script(CHAT, stream(EVENTS), close(), answer(503, {}), stream(EVENTS))
        await harness.chat(stream=True)
        gc.collect()
        gc.freeze()  # what was made before is not looked through
        gc.disable()
        try:
            for _ in range(4):
                await harness.chat(stream=True)
                await harness.chat()
            gate = Gate()
            decodes[0].script(CHAT, *[hang(gate)] * 2)
            decodes[1].script(CHAT, *[hang(gate)] * 2)
            leaving = await harness.asking()
            await gate.reached.wait()
            leaving.leave()
            await harness.settle()
            for worker in harness.router.fleet.workers:
                harness.router.upstream.cut_worker(worker)
            await asyncio.sleep(0.1)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = {type(thing).__qualname__ for thing in gc.garbage if is_the_routers(thing)}
            assert left == set()
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.unfreeze()
            gc.enable()


def is_the_routers(thing: object) -> bool:
    return type(thing).__module__.startswith(("pdserve.", "uvicorn."))
