"""Suspects go to workers one at a time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.router.dispatch.job import WorkerWait
from pdserve.router.dispatch.suspicion import Suspects
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Worker
from pdserve.router.metrics.stats import Stats
from pdserve.router.upstream.connection import UpstreamError


def call(body: bytes) -> Any:
    return SimpleNamespace(endpoint=SimpleNamespace(path="/v1/completions"), body=body)


class Scene:
    def __init__(self) -> None:
        self.workers = [Worker("decode", f"http://h:{port}") for port in (1, 2)]
        self.fleet = Fleet(self.workers)
        for worker in self.workers:
            self.fleet.on_probe_ready(worker)
        self.suspects = Suspects(self.fleet, Stats(), WorkerWait(self.fleet))

    async def lose(self, *calls: Any) -> None:
        """The first worker dies with these calls."""
        attempts = [await self.suspects.begin(each, self.workers[0]) for each in calls]
        for attempt in attempts:
            attempt.on_failure(UpstreamError("closed", "it is gone"))
            attempt.end()
        self.fleet.on_probe_not_ready(self.workers[0])


@pytest.mark.parametrize("how", ["on_first_byte", "end"])
async def test_the_next_suspect_begins_when_the_one_before_it_has_a_first_byte_or_is_over(how: str) -> None:
    scene, (one, two) = Scene(), (call(b"1"), call(b"2"))
    await scene.lose(one, two)
    first = await scene.suspects.begin(one, scene.workers[1])
    second = asyncio.ensure_future(scene.suspects.begin(two, scene.workers[1]))
    other = await scene.suspects.begin(call(b"3"), scene.workers[1])  # no suspect waits for nobody
    assert not second.done()
    getattr(first, how)()
    for attempt in (await second, other, *([] if how == "end" else [first])):
        attempt.end()


async def test_a_suspect_that_needs_two_workers_at_a_time_gets_them() -> None:
    scene, one = Scene(), call(b"1")
    await scene.lose(one, call(b"2"))
    attempts = [await asyncio.wait_for(scene.suspects.begin(one, worker), 1) for worker in scene.workers]
    for attempt in attempts:
        attempt.end()
    last = await asyncio.wait_for(scene.suspects.begin(call(b"2"), scene.workers[1]), 1)
    last.end()
