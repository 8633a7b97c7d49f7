"""Many streams at once."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator

import pytest

from pdserve.router.config import Deadlines

from .harness import disagg, run
from .mock_worker import EVENTS, STREAM, Gate, stream

CHAT = "/v1/chat/completions"
COUNT = 200
MANY = 2000
OPEN_FILES = 16384


def test_two_hundred_streams_at_once_without_error_or_leak() -> None:
    async def main() -> None:
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

    run(main(), timeout_s=60)


def test_two_hundred_clients_that_leave_together() -> None:
    async def main() -> None:
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

    run(main(), timeout_s=60)


@pytest.fixture
def many_files() -> Iterator[None]:
    """Clients, router and workers are one process here: four ends of connections for each stream."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES:
        pytest.skip(f"needs {OPEN_FILES} open files, the hard limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, OPEN_FILES), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_two_thousand_streams_at_once_without_error_or_leak() -> None:
    async def main() -> None:
        async with disagg(prefill=1, decode=2, deadlines=Deadlines()) as (harness, _, decodes):
            gate = Gate()
            for decode in decodes:
                decode.script(CHAT, *[stream(EVENTS, gate, gate_after=1)] * MANY)
            asking = [asyncio.create_task(harness.chat(stream=True)) for _ in range(MANY)]
            while harness.router.upstream.open_count - harness.router.upstream.idle_count < MANY:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            assert harness.stats.in_flight == MANY
            assert [len(decode.requests) for decode in decodes] == [MANY // 2] * 2
            gate.open.set()
            responses = await asyncio.gather(*asking)
            assert {response.body for response in responses} == {STREAM}
            assert harness.stats.requests == {(CHAT, "200"): MANY}
            assert harness.stats.stream_errors == {}

    run(main(), timeout_s=90)
