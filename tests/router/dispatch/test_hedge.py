"""A slow prefill is asked of a second worker, where the configuration says so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from pdserve.router.config.limits import Limits
from tests.support.router.harness import PATIENT, Harness, disagg
from tests.support.router.mock_worker import (
    ANSWER,
    REPORT,
    Gate,
    MockWorker,
    Script,
    answer,
    close,
    hang,
    stream,
)

CHAT, PREFILL = "/v1/chat/completions", "/pd/prefill"
UNPAID = Limits(retry_ratio=0.0, retries_per_s=0.0)


@asynccontextmanager
async def hedged(
    first: Script,
    second: Script | None = None,
    hedge_s: float = 0.05,
    prefill_s: float = 5.0,
    **config: Limits,
) -> AsyncIterator[tuple[Harness, MockWorker, MockWorker, MockWorker]]:
    """A router with two prefill workers, as the first request meets them, and a decode worker."""
    deadlines = msgspec.structs.replace(PATIENT, hedge_prefill_s=hedge_s, prefill_s=prefill_s)
    async with disagg(prefill=2, deadlines=deadlines, **config) as (harness, prefills, [decode]):
        prefills.reverse()  # the first request goes to the second of two equals
        prefills[0].script(PREFILL, first)
        if second is not None:
            prefills[1].script(PREFILL, second)
        yield harness, *prefills, decode


async def test_the_faster_worker_wins_and_the_other_is_cut() -> None:
    async with hedged(hang()) as (harness, first, second, _):
        response = await harness.chat()
        assert response.body == ANSWER
        assert response.headers["x-pdserve-prefill"] == second.id
        await first.wait_until(lambda: first.disconnected == 1)
        assert (harness.stats.hedges, harness.stats.prefill) == (1, {"ok": 1})


async def test_a_prompt_answer_is_not_hedged_even_a_bad_one() -> None:
    async with hedged(close(), hedge_s=5.0) as (harness, _, second, _):
        await harness.chat()
        assert (second.requests, harness.stats.hedges) == ([], 0)


@pytest.mark.parametrize("trouble", [close(), answer(503, {})])
async def test_a_second_worker_that_fails_does_not_spoil_the_first(trouble: Script) -> None:
    gate = Gate()
    late = stream([json.dumps(REPORT).encode()], gate, gate_after=0)
    async with hedged(late, trouble) as (harness, first, second, _):
        asking = asyncio.create_task(harness.chat())
        await second.wait_until(lambda: len(second.requests) == 1)
        gate.open.set()
        assert (await asking).headers["x-pdserve-prefill"] == first.id


async def test_what_either_says_is_the_clients_fault_is_final() -> None:
    async with hedged(hang(), answer(400, {"message": "too long"})) as (harness, _, _, decode):
        assert (await harness.chat()).status == 400
        assert decode.requests == []


async def test_a_client_that_leaves_ends_both() -> None:
    gate = Gate()
    async with hedged(hang(), hang(gate)) as (harness, first, second, _):
        client = await harness.asking()
        await gate.reached.wait()
        client.leave()
        for worker in (first, second):
            await worker.wait_until(lambda worker=worker: worker.disconnected == 1)
        await harness.assert_nothing_leaked()
        assert harness.stats.client_aborts == {"prefill": 1}


@pytest.mark.parametrize("why", ["leave", "drain", "unpaid"])
async def test_there_is_no_hedge_without_a_worker_or_a_budget_for_it(why: str) -> None:
    """The second worker leaves or is drained while the first one computes; or there is no retry budget."""
    gate = Gate()
    limits = UNPAID if why == "unpaid" else Limits()
    async with hedged(hang(gate), hedge_s=0.3, prefill_s=0.5, limits=limits) as (harness, _, second, _):
        asking = asyncio.create_task(harness.chat())
        await gate.reached.wait()
        if why == "leave":
            harness.router.fleet.members.leave(second.id)
        elif why == "drain":
            harness.router.fleet.members.drain(second.id, True)
        assert (await asking).body == ANSWER  # the decode worker computes the prompt
        assert (second.requests, harness.stats.hedges) == ([], 0)
