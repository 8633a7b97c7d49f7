"""Workers that say that they stop: nothing new is sent there, and what they have they finish."""

from __future__ import annotations

import asyncio

from pdserve.router.config.limits import Probe
from tests.support.router.harness import Harness, disagg
from tests.support.router.mock_worker import ANSWER, EVENTS, REPORT, Gate, MockWorker, Received, Wire, stream

CHAT = "/v1/chat/completions"
SOON = Probe(interval_s=0.02)


async def says_it_stops(harness: Harness, worker: MockWorker) -> None:
    worker.draining = True
    await harness.until(lambda: harness.router.fleet.by_id[worker.id].draining)  # seen by a probe


async def test_a_decode_worker_finishes_its_stream_while_sessions_move() -> None:
    async with disagg(prefill=0, decode=2, probe=SOON) as (harness, _, decodes):
        session = {"x-session-id": "s"}
        home = (await harness.chat(headers=session)).headers["x-pdserve-decode"]
        [old, new] = sorted(decodes, key=lambda worker: worker.id != home)
        gate = Gate()
        old.script(CHAT, stream(EVENTS, gate, gate_after=1))
        client = await harness.asking(session, stream=True)
        assert (await client.head()).status == 200
        await gate.reached.wait()
        await says_it_stops(harness, old)
        for headers in (session, None):
            assert (await harness.chat(headers=headers)).headers["x-pdserve-decode"] == new.id
        gate.open.set()
        rest = b""
        while data := await client.chunk():
            rest += data
        assert rest == b"".join(EVENTS)
        client.leave()
        old.draining = False  # its successor, at the same address
        await harness.until(lambda: not harness.router.fleet.by_id[old.id].draining)
        await says_it_stops(harness, new)
        assert (await harness.chat()).headers["x-pdserve-decode"] == old.id


async def test_a_prefill_worker_finishes_its_prompt() -> None:
    """A prefill worker that is merely not ready is cut off at once."""
    async with disagg(prefill=2, probe=SOON) as (harness, prefills, _):
        gate = Gate()

        async def late(wire: Wire, request: Received) -> None:
            await gate.passed()
            await wire.json(200, REPORT)

        for worker in prefills:
            worker.script("/pd/prefill", late)
        asking = asyncio.create_task(harness.chat())
        await gate.reached.wait()
        [old] = [worker for worker in prefills if worker.got("/pd/prefill")]
        await says_it_stops(harness, old)
        gate.open.set()
        answer = await asking
        assert answer.body == ANSWER
        assert answer.headers["x-pdserve-prefill"] == old.id
        assert "stage=ok" in answer.headers["x-pdserve-plan"]
        assert (await harness.chat()).headers["x-pdserve-prefill"] != old.id
