"""Workers that pause, drain, are restarted and die, in the middle of streams, behind a router of two
processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.e2e.cluster import Router, Worker, eventually, free_port, http
from tests.support.e2e.prompts import token_ids
from tests.support.e2e.site import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

ADMIN_KEY = "the-key-of-these-tests"
GREEDY = {"temperature": 0.0, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "ignore_eos": True}
TOKENS = 200
WAIT_S = 60.0


@dataclass
class Front:
    """The router of these tests."""

    router: Router
    workers: dict[str, Worker]
    """Decode workers by the router's names for them."""
    admin_port: int

    def admin(self, method: str, path: str) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.admin_port}{path}"
        answer = http.request(method, url, headers={"authorization": f"Bearer {ADMIN_KEY}"})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def state_of(self, worker: str) -> dict[str, Any]:
        listed: list[dict[str, Any]] = self.admin("GET", "/workers")["workers"]
        return next(one for one in listed if one["id"] == worker)

    def is_used(self, worker: str) -> bool:
        """Some request goes there."""
        body = {"input_ids": token_ids(9000, 20), "sampling_params": {**GREEDY, "max_new_tokens": 1}}
        answers = [http.post(f"{self.router.url}/generate", json=body) for _ in range(4)]
        assert {answer.status_code for answer in answers} == {200}
        return worker in {answer.headers["x-pdserve-decode"] for answer in answers}


@pytest.fixture(scope="module")
def front(cluster: Cluster, run_dir: Path) -> Iterator[Front]:
    admin_port = free_port()
    extra = {
        "processes": 2,
        "admin": {"port": admin_port, "key": ADMIN_KEY},
        "probe": {"interval_s": 0.2, "timeout_s": 1.0},
        "deadlines": {"between_chunks_s": 3.0},
    }
    with Router(run_dir, cluster.prefill, cluster.decode, name="router-front", extra=extra) as router:
        yield Front(router, {f"127.0.0.1:{w.port}": w for w in cluster.decode}, admin_port)


@dataclass
class Streamed:
    """A stream as its client sees it."""

    worker: str
    lines: AsyncIterator[str]
    events: list[dict[str, Any]] = field(default_factory=list)
    is_done: bool = False

    @property
    def ids(self) -> list[int]:
        return list(self.events[-1]["output_ids"])

    async def read(self, until: int | None = None) -> None:
        """To its end, or until there are so many events."""
        async for line in self.lines:
            if line == "data: [DONE]":
                self.is_done = True
            elif line.startswith("data: "):
                self.events.append(json.loads(line[6:]))
                if len(self.events) == until:
                    return


@asynccontextmanager
async def streaming(
    front: Front, seed: int, sampling: dict[str, Any], session: str, tokens: int = TOKENS
) -> AsyncIterator[Streamed]:
    """A stream that has begun."""
    body = {
        "input_ids": token_ids(seed, 100),
        "sampling_params": {**sampling, "max_new_tokens": tokens},
        "stream": True,
    }
    async with (
        httpx.AsyncClient(timeout=WAIT_S, verify=False) as client,
        client.stream(
            "POST", f"{front.router.url}/generate", json=body, headers={"x-session-id": session}
        ) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        streamed = Streamed(answer.headers["x-pdserve-decode"], answer.aiter_lines())
        await streamed.read(until=3)
        yield streamed


def expected(front: Front, seed: int, tokens: int = TOKENS) -> list[int]:
    """The greedy answer when nothing happens."""
    body = {
        "input_ids": token_ids(seed, 100),
        "sampling_params": {**GREEDY, "max_new_tokens": tokens},
    }
    answer = http.post(f"{front.router.url}/generate", json=body, timeout=120.0)
    return list(answer.json()["output_ids"])


async def lose_mid_stream(front: Front, seed: int, session: str, number: int) -> str:
    """A greedy and a sampled stream of a worker that gets this signal: the first goes on elsewhere, from
    token to token as if nothing had been, the second ends in an error event. The worker's name.
    """
    whole = await asyncio.to_thread(expected, front, seed)
    async with (
        streaming(front, seed, GREEDY, session) as greedy,
        streaming(front, seed + 1, SAMPLED, session) as sampled,
    ):
        assert greedy.worker == sampled.worker
        os.killpg(front.workers[greedy.worker].popen.pid, number)
        await asyncio.gather(greedy.read(), sampled.read())
    assert greedy.ids == whole
    assert greedy.is_done
    assert not sampled.is_done
    assert sampled.events[-1]["error"]["code"] == "worker_lost"
    return greedy.worker


def test_a_worker_that_pauses_loses_its_streams_to_another_and_is_used_again(front: Front) -> None:
    worker = asyncio.run(lose_mid_stream(front, 9100, "pausing", signal.SIGSTOP))
    os.killpg(front.workers[worker].popen.pid, signal.SIGCONT)
    eventually(lambda: front.is_used(worker), "the worker is used again", WAIT_S)


def test_a_worker_that_is_drained_finishes_what_it_has_while_sessions_move(front: Front) -> None:
    async def main() -> None:
        whole = await asyncio.to_thread(expected, front, 9110)
        async with streaming(front, 9110, GREEDY, "moving") as streamed:
            drained = await asyncio.to_thread(front.admin, "POST", f"/workers/{streamed.worker}/drain")
            assert drained["draining"]
            # each process of the router hears of it in its turn
            unused = lambda: not front.is_used(streamed.worker)  # noqa: E731
            await asyncio.to_thread(eventually, unused, "it gets no new requests", WAIT_S)
            async with streaming(front, 9111, GREEDY, "moving", 8) as moved:
                assert moved.worker != streamed.worker
                await moved.read()
            await streamed.read()
        assert streamed.ids == whole
        await asyncio.to_thread(
            eventually, lambda: front.state_of(streamed.worker)["in_flight"] == 0, "it has nothing", WAIT_S
        )
        await asyncio.to_thread(front.admin, "POST", f"/workers/{streamed.worker}/undrain")

    asyncio.run(main())


class Load:
    """Users that ask one thing after the other on connections that they keep; nothing may fail."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ends = False
        self.answered = 0

    async def user(self, number: int) -> None:
        async with httpx.AsyncClient(timeout=WAIT_S, verify=False) as client:
            count = 0
            while not self._ends:
                count += 1
                body = {
                    "input_ids": token_ids(number, 150) + token_ids(number * 1000 + count, 50),
                    "sampling_params": {**GREEDY, "max_new_tokens": 24},
                    "stream": True,
                }
                streamed = Streamed("", iter([]))  # type: ignore[arg-type]
                async with client.stream("POST", f"{self._url}/generate", json=body) as answer:
                    assert answer.status_code == 200, await answer.aread()
                    streamed.lines = answer.aiter_lines()
                    await streamed.read()
                assert streamed.is_done, streamed.events[-1]
                assert len(streamed.ids) == 24
                self.answered += 1

    async def more(self) -> None:
        """Until eight more requests are answered."""
        wanted = self.answered + 8
        while self.answered < wanted:  # noqa: ASYNC110 - a counter
            await asyncio.sleep(0.02)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            for number in range(2):
                group.create_task(self.user(number + 1))
            await self.more()
            yield
            await self.more()
            self._ends = True


def test_every_kind_of_process_is_restarted_under_load_without_a_failed_request(
    front: Front, cluster: Cluster
) -> None:
    router = front.router.process
    assert router is not None
    restarted = [*cluster.prefill[:1], *cluster.decode[:1]]

    def restart_router() -> None:
        front.router.popen.send_signal(signal.SIGHUP)
        done = "all router processes have the new configuration"
        eventually(lambda: done in router.log.read_text(), "the router is replaced", WAIT_S)

    def restart_workers() -> None:
        for worker in restarted:
            worker.popen.terminate()
        for worker in restarted:
            assert worker.popen.wait(WAIT_S) == 0, worker.name
            worker.start()
        for worker in restarted:
            worker.wait_ready()
            name = f"127.0.0.1:{worker.port}"
            eventually(lambda name=name: front.state_of(name)["ready"], "it has joined", WAIT_S)  # type: ignore[misc]

    def restart_pool() -> None:
        cluster.pool.stop()
        cluster.pool.start()

    async def main() -> None:
        load = Load(front.router.url)
        async with load.running():
            for restart in (restart_router, restart_pool, restart_workers):
                await asyncio.to_thread(restart)
                await load.more()

    asyncio.run(main())


def test_a_worker_that_is_killed_loses_its_streams_to_another(front: Front) -> None:
    worker = asyncio.run(lose_mid_stream(front, 9120, "dying", signal.SIGKILL))
    assert not front.is_used(worker)
