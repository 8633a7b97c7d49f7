"""A fleet under load: workers come and go, hang, restart and answer slowly. Real router, virtual time.

Sockets are real, so a request takes what the machine takes, and waits take no time.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

from pdserve.router.config.limits import Deadlines, Probe
from tests.support.router.harness import CHAT, Harness, disagg
from tests.support.router.mock_worker import ANSWER, MockWorker, Received, Script, Wire, hang
from tests.support.virtual_time import virtually

OF_FLEET = Deadlines(prefill_s=30.0, whole_answer_s=60.0, wait_for_worker_s=10.0)
PROBE = Probe(interval_s=5.0)


def computing(seconds: float) -> Script:
    """The usual answer, after so long."""

    async def run(wire: Wire, request: Received) -> None:
        await asyncio.sleep(seconds)
        await wire.body(200, ANSWER)

    return run


async def asked_at(
    harness: Harness, rate_s: float, seconds: float, ask: Callable[[int], Awaitable[int]]
) -> tuple[Counter[int], list[float]]:
    """Ask at a steady rate: (answers by status, how long each took). If one hung, this would."""
    loop, times_s = asyncio.get_running_loop(), list[float]()

    async def one(number: int) -> int:
        begun_s = loop.time()
        status = await ask(number)
        times_s.append(loop.time() - begun_s)
        return status

    asking = []
    for number in range(round(rate_s * seconds)):
        asking.append(asyncio.create_task(one(number)))
        await asyncio.sleep(1 / rate_s)
    return Counter(await asyncio.gather(*asking)), times_s


@virtually
async def test_250_joins_and_150_leaves_in_12_minutes_leave_no_request_hanging() -> None:
    dice, seconds = random.Random(37), 720.0
    async with disagg(prefill=4, decode=6, probe=PROBE, deadlines=OF_FLEET) as (harness, prefills, decodes):
        members, there = harness.router.fleet.members, [*prefills, *decodes]
        events = [*["join"] * 250, *["leave"] * 150]
        dice.shuffle(events)

        async def churn() -> None:
            for event in events:
                await asyncio.sleep(seconds / len(events))
                if event == "join":
                    worker = MockWorker(dice.choice(["prefill", "decode", "decode"]))
                    await worker.start()
                    there.append(worker)
                    members.join(worker.url, worker.role)  # type: ignore[arg-type]
                    continue
                roles = Counter(worker.role for worker in there)
                worker = dice.choice([worker for worker in there if roles[worker.role] > 2])
                there.remove(worker)
                how = dice.choice(["leaves", "dies", "drains"])
                if how == "drains":
                    members.drain(worker.id, True)
                    await asyncio.sleep(0.5)
                if how != "dies":
                    members.leave(worker.id)
                await worker.stop()
                if how == "dies":  # its operator takes it out some time later
                    asyncio.get_running_loop().call_later(20.0, members.leave, worker.id)

        async def ask(number: int) -> int:
            for worker in there:  # each takes its time
                if not worker.scripts.get(CHAT):
                    worker.script(CHAT, computing(1.0))
            return (await harness.chat()).status

        churning = asyncio.create_task(churn())
        answers, times_s = await asked_at(harness, 1536 / seconds, seconds, ask)
        await churning
        for worker in there[10:]:
            await worker.stop()
        print(f"{1536 - answers[200]} of 1536 requests hung or failed; the longest took {max(times_s):.1f} s")
        assert answers == {200: 1536}
        assert max(times_s) < 10, "a try at a worker that has gone, and another one"


@virtually
async def test_a_worker_that_hangs_one_that_is_slow_and_one_that_restarts_stall_nobody_else() -> None:
    async with disagg(prefill=2, decode=5, probe=PROBE, deadlines=OF_FLEET) as (harness, prefills, decodes):
        hanging, slow, restarting, *_ = decodes
        hanging.script("/pd/ready", *[hang()] * 1000)
        prefills[0].script("/pd/ready", *[hang()] * 1000)

        async def restart() -> None:
            port = restarting.port
            while True:
                await asyncio.sleep(10.0)
                await restarting.stop()
                await asyncio.sleep(3.0)
                await restarting.start(port)

        async def ask(number: int) -> int:
            hanging.script(CHAT, hang())
            prefills[0].script("/pd/prefill", hang())
            slow.script(CHAT, computing(5.0))
            return (await harness.chat()).status

        restarts = asyncio.create_task(restart())
        answers, times_s = await asked_at(harness, 4.0, 120.0, ask)
        restarts.cancel()
        stalled = len(hanging.got(CHAT)) + len(prefills[0].got("/pd/prefill"))
        assert answers[200] >= 480 - len(hanging.got(CHAT))
        assert sum(taken_s > 7.0 for taken_s in times_s) <= stalled < 48, (
            "each tenth at most, while it was new"
        )
        assert max(times_s) < OF_FLEET.prefill_s + OF_FLEET.whole_answer_s + 5
        assert len(slow.got(CHAT)) < len(decodes[3].got(CHAT)), "it has more under way"
