"""What becomes of requests that cannot get their service level, through a router on a real port.

A token of a prompt takes 0.1 ms and a token has 4 bytes, so `prompt(200)` takes 200 ms.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdserve.router.config.slo import ServiceLevel
from pdserve.router.config.tenants import Admission, TenantLimits
from pdserve.router.dispatch.service_level import OnMiss, act_on
from tests.support.router.harness import Connection, Harness, disagg
from tests.support.router.mock_worker import REPORT, Gate, MockWorker, Received, Script, Wire

LEVEL = ServiceLevel(ttft_ms=250.0)


def prompt(takes_ms: int, letter: str = "x") -> list[dict[str, str]]:
    """Prompts of other letters have no beginning in common."""
    return [{"role": "user", "content": letter * (takes_ms * 40)}]


def prefilled_after(gate: Gate) -> Script:
    async def run(wire: Wire, request: Received) -> None:
        await gate.passed()
        await wire.json(200, REPORT)

    return run


@asynccontextmanager
async def busy(on_miss: OnMiss, **config: Any) -> AsyncIterator[tuple[Harness, MockWorker, Connection, Gate]]:
    """A router whose only prefill worker computes a prompt of 200 ms until the gate is opened."""
    limits = TenantLimits(on_slo_miss=on_miss)
    async with disagg(slo=LEVEL, tenant_defaults=limits, **config) as (harness, (prefill,), _):
        gate = Gate()
        prefill.script("/pd/prefill", prefilled_after(gate))
        first = await harness.asking(messages=prompt(200))
        await gate.reached.wait()
        yield harness, prefill, first, gate
        gate.open.set()
        response = await first.response()
        assert response.status == 200
        assert "x-pdserve-slo" not in response.headers


def acts(harness: Harness) -> dict[str, int]:
    return {act: count for (_, act), count in harness.stats.slo.items() if count}


async def until_acts(harness: Harness, **wanted: int) -> None:
    await harness.until(lambda: acts(harness) == wanted)


async def test_a_late_request_is_marked_and_served() -> None:
    async with busy("mark") as (harness, prefill, _, gate):
        late = await harness.asking(messages=prompt(100))
        await prefill.wait_until(lambda: len(prefill.got("/pd/prefill")) == 2)
        gate.open.set()
        response = await late.response()
        assert response.status == 200
        assert response.headers["x-pdserve-slo"] == "late"
        assert "slo=late(" in response.headers["x-pdserve-plan"]
        assert acts(harness) == {"met": 1, "mark": 1}


async def test_a_late_request_is_refused_with_the_time_to_try_again() -> None:
    async with busy("refuse") as (harness, prefill, _, _):
        response = await harness.chat(messages=prompt(100))
        assert response.status == 429
        assert response.error["code"] == "service_level"
        assert int(response.headers["retry-after"]) >= 1
        assert len(prefill.got("/pd/prefill")) == 1
        assert acts(harness) == {"met": 1, "refuse": 1}


async def test_late_requests_wait_until_the_level_can_be_kept_one_after_the_other() -> None:
    async with busy("queue") as (harness, prefill, _, gate):
        held = [Gate(), Gate()]
        prefill.script("/pd/prefill", *map(prefilled_after, held))
        waiting = [await harness.asking(messages=prompt(200, letter)) for letter in "yz"]
        await until_acts(harness, met=1, queue=2)
        assert len(prefill.got("/pd/prefill")) == 1
        gate.open.set()
        await held[0].reached.wait()  # 200 ms of it are now ahead of the other one
        for _ in range(5):
            await asyncio.sleep(0.02)
            assert len(prefill.got("/pd/prefill")) == 2
        held[0].open.set()
        await held[1].reached.wait()
        held[1].open.set()
        for one in waiting:
            response = await one.response()
            assert response.status == 200
            assert "x-pdserve-slo" not in response.headers


async def test_a_request_that_waits_too_long_is_refused() -> None:
    async with busy("queue", admission=Admission(queue_s=0.1)) as (harness, prefill, _, _):
        response = await harness.chat(messages=prompt(100))
        assert response.status == 429
        assert response.error["code"] == "service_level"
        assert len(prefill.got("/pd/prefill")) == 1
        assert acts(harness) == {"met": 1, "queue": 1, "refuse": 1}


async def test_a_waiting_request_whose_client_leaves_lets_the_next_one_go() -> None:
    async with busy("queue") as (harness, _, _, gate):
        gone = await harness.asking(messages=prompt(100))
        await until_acts(harness, met=1, queue=1)
        stays = await harness.asking(messages=prompt(100))
        await until_acts(harness, met=1, queue=2)
        gone.leave()
        await harness.until(lambda: harness.stats.in_flight == 2)
        gate.open.set()
        assert (await stays.response()).status == 200


@pytest.mark.parametrize("on_miss", ["mark", "queue", "refuse"])
async def test_a_prompt_that_is_too_long_for_the_level_is_always_served_and_marked(on_miss: OnMiss) -> None:
    limits = TenantLimits(on_slo_miss=on_miss)
    async with disagg(slo=LEVEL, tenant_defaults=limits) as (harness, _, _):
        response = await harness.chat(messages=prompt(300))
        assert response.status == 200
        assert response.headers["x-pdserve-slo"] == "long"


async def test_without_a_level_nothing_is_expected() -> None:
    async with disagg() as (harness, _, _):
        response = await harness.chat(messages=prompt(10_000))
        assert response.status == 200
        assert "x-pdserve-slo" not in response.headers
        assert acts(harness) == {}
        assert "workers_wanted" not in {k for k, v in harness.router.own_metrics().values.items() if v}


async def test_other_endpoints_have_no_service_level() -> None:
    async with busy("refuse") as (harness, _, _, _):
        assert (await harness.post("/tokenize", {"model": "m", "prompt": "hi"})).status == 200
        assert acts(harness) == {"met": 1}


async def test_what_streams_kept_is_counted_and_workers_are_wanted() -> None:
    async with disagg(slo=ServiceLevel(ttft_ms=1e6, itl_ms=1e-6)) as (harness, _, _):
        await harness.chat(stream=True, messages=prompt(500))
        await harness.settle()
        values = harness.router.own_metrics().values
        assert values["slo_streams"] in ({("m", "itl"): 1}, {("m", "met"): 1})
        assert set(values["workers_wanted"]) == {("m", "prefill"), ("m", "decode")}
        assert values["workers_wanted"]["m", "prefill"] > 0


def test_what_becomes_of_a_request() -> None:
    every: tuple[OnMiss, ...] = ("mark", "queue", "refuse")
    assert [act_on("met", one) for one in every] == ["met"] * 3
    assert [act_on("late", one) for one in every] == ["mark", "queue", "refuse"]
    assert [act_on("long", one) for one in every] == ["mark"] * 3


def test_kept_names_what_was_missed() -> None:
    level = ServiceLevel(ttft_ms=100.0, itl_ms=10.0)
    assert [level.kept(*times) for times in ((100, 10), (101, 10), (100, 11), (101, 11))] == [
        "met",
        "ttft",
        "itl",
        "both",
    ]
    assert ServiceLevel(itl_ms=10.0).kept(1e9, 5.0) == "met"
