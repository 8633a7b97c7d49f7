"""A slow prefill is asked of a second worker, where the configuration says so."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from pdserve.router.config.limits import Deadlines, Limits
from tests.support.router.harness import FAST, chat_body, disagg, run
from tests.support.router.mock_worker import ANSWER, REPORT, Gate, Script, answer, close, hang, stream

CHAT = "/v1/chat/completions"
PREFILL = "/pd/prefill"
HEDGED = msgspec.structs.replace(FAST, hedge_prefill_s=0.05)


def test_the_faster_worker_wins_and_the_other_is_cut() -> None:
    async def main() -> None:
        async with disagg(prefill=2, deadlines=HEDGED) as (harness, prefills, _):
            prefills.reverse()  # the first request goes to the second of two equals
            prefills[0].script(PREFILL, hang(Gate()))
            response = await harness.chat()
            assert response.body == ANSWER
            assert response.headers["x-pdserve-prefill"] == prefills[1].id
            await prefills[0].wait_until(lambda: prefills[0].disconnected == 1)
            assert harness.stats.hedges == 1
            assert harness.stats.prefill == {"ok": 1}

    run(main())


def test_a_prompt_prefill_is_not_hedged() -> None:
    async def main() -> None:
        slow: Deadlines = msgspec.structs.replace(FAST, hedge_prefill_s=5.0)
        async with disagg(prefill=2, deadlines=slow) as (harness, prefills, _):
            prefills.reverse()  # the first request goes to the second of two equals
            prefills[0].script(PREFILL, close())
            await harness.chat()
            assert prefills[1].requests == []
            assert harness.stats.hedges == 0

    run(main())


@pytest.mark.parametrize("second", [close(), answer(503, {})])
def test_a_second_worker_that_fails_does_not_spoil_the_first(second: Script) -> None:
    async def main() -> None:
        async with disagg(prefill=2, deadlines=HEDGED) as (harness, prefills, _):
            prefills.reverse()  # the first request goes to the second of two equals
            gate = Gate()
            report = json.dumps(REPORT).encode()
            prefills[0].script(PREFILL, stream([report], gate, gate_after=0))
            prefills[1].script(PREFILL, second)
            client = await harness.connect()
            await client.send(CHAT, json.dumps(chat_body()).encode())
            await prefills[1].wait_until(lambda: len(prefills[1].requests) == 1)
            gate.open.set()
            response = await client.response()
            assert response.headers["x-pdserve-prefill"] == prefills[0].id
            client.leave()

    run(main())


def test_what_either_says_is_the_clients_fault_is_final() -> None:
    async def main() -> None:
        async with disagg(prefill=2, deadlines=HEDGED) as (harness, prefills, [decode]):
            prefills.reverse()  # the first request goes to the second of two equals
            prefills[0].script(PREFILL, hang(Gate()))
            prefills[1].script(PREFILL, answer(400, {"message": "too long"}))
            assert (await harness.chat()).status == 400
            assert decode.requests == []

    run(main())


def test_a_client_that_leaves_ends_both() -> None:
    async def main() -> None:
        async with disagg(prefill=2, deadlines=HEDGED) as (harness, prefills, _):
            prefills.reverse()  # the first request goes to the second of two equals
            gates = [Gate(), Gate()]
            for prefill, gate in zip(prefills, gates, strict=True):
                prefill.script(PREFILL, hang(gate))
            client = await harness.connect()
            await client.send(CHAT, json.dumps(chat_body()).encode())
            await gates[1].reached.wait()
            client.leave()
            for prefill in prefills:
                await prefill.wait_until(lambda prefill=prefill: prefill.disconnected == 1)
            await harness.assert_nothing_leaked()
            assert harness.stats.client_aborts == {"prefill": 1}

    run(main())


@pytest.mark.parametrize("told", ["leave", "drain"])
def test_a_worker_that_leaves_while_prefill_runs_is_not_asked_for_a_hedge(told: str) -> None:
    async def main() -> None:
        deadlines = msgspec.structs.replace(FAST, hedge_prefill_s=0.5, prefill_s=1.0)
        async with disagg(prefill=2, deadlines=deadlines) as (harness, prefills, _):
            prefills.reverse()  # the first request goes to the second of two equals
            fleet, gate = harness.router.fleet, Gate()
            prefills[0].script(PREFILL, hang(gate))
            asking = asyncio.create_task(harness.chat())
            await gate.reached.wait()
            if told == "leave":
                fleet.leave(prefills[1].id)
            else:
                fleet.drain(prefills[1].id, True)
            assert (await asking).body == ANSWER  # the decode worker does it alone
            assert prefills[1].requests == []
            assert harness.stats.hedges == 0

    run(main())


def test_hedges_are_paid_for_from_the_retry_budget() -> None:
    async def main() -> None:
        limits = Limits(retry_ratio=0.0, retries_per_s=0.0)
        deadlines = msgspec.structs.replace(HEDGED, prefill_s=0.3)
        async with disagg(prefill=2, deadlines=deadlines, limits=limits) as (harness, prefills, _):
            prefills.reverse()  # the first request goes to the second of two equals
            prefills[0].script(PREFILL, hang(Gate()))
            assert (await harness.chat()).body == ANSWER
            assert prefills[1].requests == []

    run(main())
