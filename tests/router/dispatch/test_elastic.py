"""Elastic workers behind a router on a real port: each request has a worker for each role."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdserve.router.config.router import RouterConfig
from tests.support.router.harness import CHAT, PATIENT, Harness, routed
from tests.support.router.mock_worker import Gate, MockWorker, hang, workers


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Duties follow the load at once."""
    monkeypatch.setattr("pdserve.router.placement.elastic.WINDOW_S", 0.05)
    monkeypatch.setattr("pdserve.router.placement.elastic.DWELL_S", 0.0)


@asynccontextmanager
async def elastic(count: int = 2, **config: Any) -> AsyncIterator[tuple[Harness, list[MockWorker]]]:
    made = [MockWorker("elastic") for _ in range(count)]
    async with workers(*made):
        settings = {"elastic": tuple(one.url for one in made), "deadlines": PATIENT}
        settings |= {"min_prefill_tokens": 0} | config
        async with routed(RouterConfig(**settings)) as harness:
            yield harness, made


async def test_one_worker_prefills_and_the_other_one_answers() -> None:
    async with elastic() as (harness, made):
        response = await harness.chat()
        assert response.status == 200
        by_id = {worker.id: worker for worker in made}
        prefill = by_id[response.headers["x-pdserve-prefill"]]
        decode = by_id[response.headers["x-pdserve-decode"]]
        assert prefill is not decode
        assert [one.path for one in prefill.requests] == ["/pd/prefill"]
        assert [one.path for one in decode.requests] == [CHAT]
        ready = (await harness.get("/ready")).json()
        assert ready["ready"] is True
        assert ready["mode"] == "disagg"
        assert {worker["role"] for worker in ready["workers"]} == {"elastic"}
        values = harness.router.own_metrics().values
        assert values["worker_prefills"] == {(prefill.id, "elastic"): 1, (decode.id, "elastic"): 0}
        assert set(values["workers_wanted"]) == {("m", "elastic")}


async def test_the_last_worker_does_both_and_a_lost_one_is_replaced() -> None:
    async with elastic() as (harness, made):
        response = await harness.chat()
        decode = next(worker for worker in made if worker.id == response.headers["x-pdserve-decode"])
        await decode.stop()
        for _ in range(3):
            response = await harness.chat()
            assert response.status == 200
            assert response.headers["x-pdserve-decode"] != decode.id


async def test_prefills_are_counted_apart_from_answers() -> None:
    async with elastic() as (harness, made):
        gate = Gate()
        for worker in made:
            worker.script("/pd/prefill", hang(gate))
        asking = await harness.asking()
        await gate.reached.wait()
        loads = sorted((w.in_flight, w.prefilling, w.answering) for w in harness.router.fleet.workers)
        assert loads == [(1, 0, 1), (1, 1, 0)]
        asking.leave()
        await harness.settle()
        assert [w.prefilling for w in harness.router.fleet.workers] == [0, 0]
