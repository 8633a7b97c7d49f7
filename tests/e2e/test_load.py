"""Many streams, and clients that leave: nothing fails, nothing leaks."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import httpx
import pytest

from tests.support.e2e.cluster import Worker, eventually, metric
from tests.support.e2e.prompts import token_ids
from tests.support.e2e.site import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

STREAMS = 64
WHOLE = 3000
"""Tokens of an answer that nobody waits for. It would take many seconds."""
EACH = int(os.environ.get("PDSERVE_TEST_STREAMS_EACH", "4"))


def idle(worker: Worker) -> bool:
    return not sum(metric(worker.url, f"sglang:num_{kind}_reqs") for kind in ("running", "queue"))


def generated(cluster: Cluster) -> float:
    """Tokens of all answers that came to their end."""
    return sum(metric(worker.url, "sglang:generation_tokens_total") for worker in cluster.workers)


def assert_stopped(cluster: Cluster, generated_before: float) -> None:
    """Nobody goes on with an answer of WHOLE tokens, and nobody came to its end."""
    assert_nothing_leaks(cluster)
    assert generated(cluster) - generated_before < WHOLE


def assert_nothing_leaks(cluster: Cluster) -> None:
    """No request left in SGLang, all its slots free, no pin and no reservation in the pool."""
    for worker in cluster.workers:
        eventually(lambda worker=worker: idle(worker), f"{worker.name} is idle", 60.0)  # type: ignore[misc]
        # SGLang refuses to flush while a slot is in use, and checks its own slot accounting when idle
        worker.flush()

    def clean() -> bool:
        status = cluster.pool.status()
        return (status.pins, status.waiters, status.reserved_bytes) == (0, 0, 0)

    eventually(clean, "the pool holds no pins, waiters or reservations", 15.0)
    status = cluster.pool.status()
    total = status.free_bytes + status.used_bytes + status.reserved_bytes + status.quarantined_bytes
    assert total == status.capacity_bytes


async def one_stream(client: httpx.AsyncClient, url: str, seed: int) -> int:
    """One streamed completion, read to its end; how many chunks it had."""
    body = {
        "model": "demo-tiny",
        "prompt": token_ids(seed % 40, 200) + token_ids(seed, 60),
        "max_tokens": 16,
        "stream": True,
        "ignore_eos": True,
    }
    chunks = 0
    done = False
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                assert "error" not in json.loads(line[6:]), line
                chunks += 1
    assert done, "the stream ended without [DONE]"
    return chunks


def test_sixty_four_streams_at_a_time_end_without_error_or_leak(cluster: Cluster) -> None:
    async def user(client: httpx.AsyncClient, number: int) -> None:
        for count in range(EACH):
            assert await one_stream(client, cluster.router.url, number * 1000 + count) > 0

    async def run() -> None:
        limits = httpx.Limits(max_connections=STREAMS)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            await asyncio.gather(*(user(client, number) for number in range(STREAMS)))

    asyncio.run(run())
    assert_nothing_leaks(cluster)


async def leave_after(url: str, body: dict[str, Any], leave: Any) -> None:
    """Start a request and drop its connection when `leave(response)` returns."""
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as response,
    ):
        await leave(response)


def test_a_client_that_leaves_mid_stream_stops_the_decode(cluster: Cluster) -> None:
    before = generated(cluster)
    body = {
        "model": "demo-tiny",
        "prompt": token_ids(8000, 300),
        "max_tokens": WHOLE,
        "stream": True,
        "ignore_eos": True,
    }

    async def first_chunk(response: httpx.Response) -> None:
        async for _ in response.aiter_lines():
            return

    asyncio.run(leave_after(cluster.router.url, body, first_chunk))
    assert_stopped(cluster, before)


@pytest.mark.parametrize(("stream", "phase"), [(False, "prefill"), (True, "prefill"), (False, "decode")])
def test_a_client_that_leaves_before_the_first_byte_stops_prefill_and_decode(
    cluster: Cluster, stream: bool, phase: str
) -> None:
    before = generated(cluster)
    seed = 8100 + stream + 2 * (phase == "decode")
    body = {
        "model": "demo-tiny",
        "prompt": token_ids(seed, 500),
        "max_tokens": WHOLE,
        "stream": stream,
        "ignore_eos": True,
    }

    async def run() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            request = asyncio.create_task(client.post(f"{cluster.router.url}/v1/completions", json=body))
            asked = cluster.decode if phase == "decode" else cluster.workers
            busy = lambda: any(not idle(worker) for worker in asked)  # noqa: E731
            await asyncio.to_thread(eventually, busy, "a worker runs the request", 60.0, 0.01)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)

    asyncio.run(run())
    assert_stopped(cluster, before)
