"""A burst of one cold prompt: one prefill, whatever becomes of who asked for it first."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from pdserve.router.api.endpoints import ENDPOINTS
from pdserve.router.config.limits import Deadlines
from pdserve.router.placement.planner import RequestFacts
from pdserve.router.placement.prefix_index import Prefix
from pdserve.router.proxy.shared_prefill import SharedPrefills
from pdserve.router.request.request import Request
from tests.support.router.harness import CHAT, PATIENT, Connection, Harness, disagg
from tests.support.router.mock_worker import REPORT, Gate, MockWorker, answer, hang, held

PROMPT = [{"role": "user", "content": "a long document " * 300}]
BURST = 12


async def burst(
    harness: Harness, prefill: MockWorker, count: int = BURST, messages: Any = PROMPT
) -> list[Connection]:
    """Clients that have asked for the same, the first of them at the prefill worker, the others behind it."""
    before, in_flight = len(prefill.got("/pd/prefill")), harness.in_flight
    clients = [await harness.asking(messages=messages)]
    await prefill.wait_until(lambda: len(prefill.got("/pd/prefill")) > before)
    clients += [await harness.asking(messages=messages) for _ in range(count - 1)]
    await harness.until(lambda: harness.in_flight == in_flight + count)
    for _ in range(20):  # until each of them has come to its stage
        await asyncio.sleep(0)
    return clients


async def plans(clients: list[Connection]) -> Counter[str]:
    """What the answers say of the prefill stage; each of them is whole."""
    answers = [await client.response() for client in clients]
    assert [one.status for one in answers] == [200] * len(answers)
    return Counter(one.headers["x-pdserve-plan"].rpartition("stage=")[2] for one in answers)


async def test_a_cold_prompt_of_many_clients_is_computed_once() -> None:
    gate = Gate()
    async with disagg(prefill=2, decode=2, min_prefill_tokens=256) as (harness, prefills, decodes):
        for prefill in prefills:
            prefill.script("/pd/prefill", held(gate, REPORT))
        first = [await harness.asking(messages=PROMPT) for _ in range(BURST)]
        await asyncio.wait_for(gate.reached.wait(), 10)
        await harness.until(lambda: harness.in_flight == BURST)
        for _ in range(20):
            await asyncio.sleep(0)
        at_prefill = [w.in_flight for w in harness.router.fleet.workers if w.role == "prefill"]
        assert sorted(at_prefill) == [0, 1], "who waits is no load there"
        gate.open.set()
        assert await plans(first) == {"ok": 1, "shared": BURST - 1}
        assert sum(len(prefill.got("/pd/prefill")) for prefill in prefills) == 1
        assert sum(len(decode.got("/v1/chat/completions")) for decode in decodes) == BURST
        assert harness.stats.prefill == {"ok": 1, "shared": BURST - 1}


@pytest.mark.parametrize("trouble", ["500", "cut", "gone"])
async def test_when_the_first_fails_another_takes_over_and_the_rest_wait_for_that_one(trouble: str) -> None:
    broken, second = Gate(), Gate()
    script = held(broken, {"error": {"message": "no"}}, 500) if trouble == "500" else hang(broken)
    async with disagg(min_prefill_tokens=256) as (harness, (prefill,), _):
        prefill.script("/pd/prefill", script, held(second, REPORT))
        clients = await burst(harness, prefill)
        if trouble == "gone":
            clients.pop(0).leave()
        else:
            broken.open.set()
        await asyncio.wait_for(second.reached.wait(), 10)
        assert len(prefill.got("/pd/prefill")) == 2
        second.open.set()
        outcomes = await plans(clients)
        assert outcomes["ok"] == 1
        assert outcomes["shared"] == BURST - 2
        assert len(prefill.got("/pd/prefill")) == 2


async def test_where_every_try_fails_each_request_is_answered_all_the_same() -> None:
    first = Gate()
    async with disagg(min_prefill_tokens=256) as (harness, (prefill,), _):
        no = {"error": {"message": "no"}}
        prefill.script("/pd/prefill", held(first, no, 500), *[answer(500, no)] * BURST)
        clients = await burst(harness, prefill)
        first.open.set()
        assert (await plans(clients))["shared"] == 0


async def test_clients_that_leave_while_they_wait_leave_nothing_behind() -> None:
    gate = Gate()
    async with disagg(min_prefill_tokens=256) as (harness, (prefill,), _):
        prefill.script("/pd/prefill", held(gate, REPORT))
        leader, *followers = await burst(harness, prefill)
        for follower in followers:
            follower.leave()
        await harness.until(lambda: harness.in_flight == 1)
        leader.leave()
        await harness.until(lambda: harness.in_flight == 0)
        assert len(prefill.got("/pd/prefill")) == 1
        assert (await harness.chat(messages=PROMPT)).status == 200


async def test_pages_that_are_not_in_the_pool_are_found_where_they_were_computed() -> None:
    gate = Gate()
    async with disagg(prefill=2, min_prefill_tokens=256) as (harness, prefills, _):
        for prefill in prefills:
            prefill.script("/pd/prefill", held(gate, REPORT | {"missing_pages": 2}))
        clients = [await harness.asking(messages=PROMPT) for _ in range(4)]
        await asyncio.wait_for(gate.reached.wait(), 10)
        await harness.until(lambda: harness.in_flight == 4)
        gate.open.set()
        assert (await plans(clients))["shared"] == 0
        assert sorted(len(prefill.got("/pd/prefill")) for prefill in prefills) == [0, 4]


async def test_a_wait_has_the_deadline_of_the_stage() -> None:
    deadlines = Deadlines(**{**{f: getattr(PATIENT, f) for f in PATIENT.__struct_fields__}, "prefill_s": 0.2})
    async with disagg(min_prefill_tokens=256, deadlines=deadlines) as (harness, (prefill,), _):
        prefill.script("/pd/prefill", *[hang()] * BURST)
        clients = [await harness.asking(messages=PROMPT) for _ in range(3)]
        outcomes = await plans(clients)
        assert outcomes["ok"] == outcomes["shared"] == 0
        assert sum(outcomes.values()) == 3


class Asked(Request):
    """As much of a request as is asked for here."""

    def __init__(self) -> None:
        self.facts = RequestFacts(ENDPOINTS[CHAT], prompt_tokens_estimate=512, prefix=Prefix((1, 2)))


@pytest.mark.parametrize("is_told_first", [True, False])
async def test_one_that_leaves_as_it_takes_over_hands_on(is_told_first: bool) -> None:
    shared, calls = SharedPrefills(), [Asked() for _ in range(4)]
    end_s = asyncio.get_running_loop().time() + 60.0
    assert [shared.begin(call, 512) for call in calls] == [False, True, True, True]
    waits = [asyncio.ensure_future(shared.wait(call, end_s)) for call in calls[1:]]
    await asyncio.sleep(0)
    if is_told_first:
        shared.end(calls[0], None)
    for wait in waits[:2]:
        wait.cancel()
    if not is_told_first:
        shared.end(calls[0], None)
    assert await waits[2] is None, "the last one leads"
    shared.end(calls[3], None)
    assert not shared.begin(Asked(), 512), "nothing is left behind"
