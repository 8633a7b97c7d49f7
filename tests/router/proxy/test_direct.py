"""The direct way: a prefill worker and a decode worker get a request at once. Beside them stands a decode
worker that computes prompts, for when one of the two fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from pdserve.router.config.limits import Deadlines
from tests.support.router.harness import CHAT, PATIENT, Harness, before, chat_body
from tests.support.router.mock_worker import (
    ANSWER,
    DONE,
    EVENTS,
    MARKS,
    REPORT,
    STREAM,
    Gate,
    MockWorker,
    Script,
    answer,
    close,
    hang,
    held,
    stream,
)
from tests.support.router.streams import marked

PREFILL = "/pd/prefill"
PORT = 8998
ROOM = "x-pdserve-room"


@asynccontextmanager
async def pair(
    *, fallback: bool = True, **deadlines: float
) -> AsyncIterator[tuple[Harness, MockWorker, MockWorker, MockWorker]]:
    """A router before a pair of the direct way, and a decode worker of the pool's way."""
    prefill = MockWorker("prefill", handoff="direct", bootstrap_port=PORT)
    decode, other = MockWorker("decode", handoff="direct"), MockWorker("decode")
    made = (prefill, decode, other) if fallback else (prefill, decode)
    limits: Deadlines = msgspec.structs.replace(PATIENT, **deadlines)
    async with before(*made, deadlines=limits, handoff="direct") as harness:
        yield harness, prefill, decode, other


async def test_both_workers_get_the_request_at_once_and_meet_in_one_room() -> None:
    async with pair() as (harness, prefill, decode, other):
        gates = Gate(), Gate()
        prefill.script(PREFILL, held(gates[0], REPORT))
        decode.script(CHAT, held(gates[1]))
        client = await harness.asking()
        for gate in gates:
            await asyncio.wait_for(gate.reached.wait(), 5)
        for gate in gates:
            gate.open.set()
        response = await client.response()
        assert response.body == ANSWER
        [sent], [asked] = prefill.got(PREFILL), decode.got(CHAT)
        host, port, number = sent.headers[ROOM].split(" ")
        assert (host, port) == ("127.0.0.1", str(PORT))
        assert 0 < int(number) < 2**62
        assert asked.headers[ROOM] == sent.headers[ROOM]
        assert sent.json() == asked.json() == chat_body()
        assert sent.target == f"{PREFILL}?endpoint={CHAT}"
        assert response.headers["x-pdserve-plan"].startswith("handoff=direct(configured), decode=")
        assert response.headers["x-pdserve-decode"] == decode.id
        assert not other.got(CHAT)
        await harness.settle()
        assert harness.stats.direct == {"ok": 1}


async def test_each_request_has_a_room_of_its_own() -> None:
    async with pair() as (harness, _, decode, _):
        for _ in range(3):
            await harness.chat(headers={ROOM: "198.51.100.7 1 5"})  # a client's own does not count
        rooms = {request.headers[ROOM] for request in decode.got(CHAT)}
        assert len(rooms) == 3
        assert all(room.startswith(f"127.0.0.1 {PORT} ") for room in rooms)


@pytest.mark.parametrize(
    ("failing", "script", "outcome"),
    [
        ("prefill", close(), "prefill-closed"),
        ("prefill", answer(500, {}), "prefill-status-500"),
        ("prefill", answer(200, []), "prefill-garbage"),
        ("decode", close(), "decode-closed"),
        ("decode", answer(503, {}), "decode-status-503"),
    ],
)
async def test_a_worker_that_fails_costs_the_direct_way_only(
    failing: str, script: Script, outcome: str
) -> None:
    async with pair() as (harness, prefill, decode, other):
        prefill.script(PREFILL, script if failing == "prefill" else hang())
        decode.script(CHAT, script if failing == "decode" else hang())
        response = await harness.chat()
        assert (response.body, response.headers["x-pdserve-decode"]) == (ANSWER, other.id)
        again = "handoff=pool(only), " if failing == "prefill" else ""
        assert f"direct={outcome}, {again}" in response.headers["x-pdserve-plan"]
        spared = decode if failing == "prefill" else prefill
        await spared.wait_until(lambda: spared.disconnected == 1)
        assert harness.stats.direct == {outcome: 1}
        by_pool = [*other.got(CHAT), *prefill.got(PREFILL)[1:]]
        assert not any(ROOM in request.headers for request in by_pool)
        assert failing == "prefill" or len(by_pool) == 2


async def test_without_a_worker_that_computes_prompts_a_late_prefill_worker_is_waited_for() -> None:
    async with pair(fallback=False, direct_s=0.01) as (harness, prefill, decode, _):
        gate = Gate()
        prefill.script(PREFILL, held(gate, REPORT))
        decode.script(CHAT, held(gate))
        client = await harness.asking()
        await asyncio.wait_for(gate.reached.wait(), 5)
        await asyncio.sleep(0.05)  # longer than direct_s
        gate.open.set()
        assert (await client.response()).body == ANSWER


async def test_without_any_other_worker_a_lost_prefill_worker_is_a_503() -> None:
    async with pair(fallback=False) as (harness, prefill, decode, _):
        prefill.script(PREFILL, close())
        decode.script(CHAT, hang())
        response = await harness.chat()
        assert response.status == 503
        assert "No prefill worker is ready" in response.error["message"]


async def test_the_prefill_workers_word_on_a_wrong_request_reaches_the_client() -> None:
    async with pair() as (harness, prefill, decode, other):
        wrong = {
            "error": {"message": "too long", "type": "invalid_request_error", "param": None, "code": None}
        }
        prefill.script(PREFILL, answer(400, wrong))
        decode.script(CHAT, hang())
        response = await harness.chat()
        assert (response.status, response.error["message"]) == (400, "too long")
        assert not other.got(CHAT)


async def test_a_stream_that_breaks_off_goes_on_at_a_worker_that_computes_prompts() -> None:
    async with pair() as (harness, _, decode, other):
        decode.script(CHAT, marked(EVENTS[0] + MARKS[0], cut=True))
        response = await harness.chat(stream=True, temperature=0)
        assert response.body.endswith(DONE)
        assert response.body == STREAM
        assert len(other.got("/pd/continue")) == 1
        assert sum(harness.stats.continued.values()) == 1


async def test_a_lost_prefill_worker_does_not_matter_once_the_answer_has_begun() -> None:
    async with pair() as (harness, prefill, decode, _):
        lost, rest = Gate(), Gate()
        prefill.script(PREFILL, hang(lost))
        decode.script(CHAT, stream([EVENTS[0], b"".join(EVENTS[1:])], rest, gate_after=1))
        client = await harness.asking(stream=True)
        await client.head()
        assert await client.chunk() == EVENTS[0]
        lost.open.set()
        await prefill.wait_until(lambda: not prefill.disconnected)
        await harness.until(lambda: harness.stats.prefill["closed"] == 1)
        rest.open.set()
        assert await client.chunk() == b"".join(EVENTS[1:])


async def test_a_client_that_leaves_is_hung_up_on_at_both_workers() -> None:
    async with pair() as (harness, prefill, decode, other):
        gates = Gate(), Gate()
        prefill.script(PREFILL, hang(gates[0]))
        decode.script(CHAT, hang(gates[1]))
        client = await harness.asking()
        for gate in gates:
            await asyncio.wait_for(gate.reached.wait(), 5)
        client.leave()
        for worker in (prefill, decode):
            await worker.wait_until(lambda worker=worker: worker.disconnected == 1)  # type: ignore[misc]
        assert not other.requests


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"best_of": 2},
        {"return_hidden_states": True},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    ],
)
async def test_what_a_decode_worker_cannot_answer_from_kv_alone_goes_through_the_pool(
    more: dict[str, Any],
) -> None:
    async with pair() as (harness, prefill, decode, other):
        response = await harness.chat(**more)
        assert response.headers["x-pdserve-plan"].startswith("handoff=pool(only), ")
        assert len(other.got(CHAT)) == 1
        assert not decode.got(CHAT)
        by_pool = prefill.got(PREFILL)
        assert len(by_pool) == ("messages" not in more)  # nobody can wait for pages of images
        assert not any(ROOM in request.headers for request in by_pool)


async def test_without_a_worker_for_it_such_a_request_is_a_503_that_says_so() -> None:
    async with pair(fallback=False) as (harness, _, decode, _):
        response = await harness.chat(n=2)
        assert response.status == 503
        assert "needs a worker that computes prompts" in response.error["message"]
        assert not decode.got(CHAT)


async def test_a_late_pair_counts_against_both_workers() -> None:
    async with pair(direct_s=0.02) as (harness, prefill, decode, other):
        for _ in range(3):
            prefill.script(PREFILL, hang())
            decode.script(CHAT, hang())
            late = await harness.chat()
            assert (late.body, late.headers["x-pdserve-decode"]) == (ANSWER, other.id)
        response = await harness.chat()
        assert not response.headers["x-pdserve-plan"].startswith("handoff=direct")
        assert harness.stats.direct == {"prefill-timeout": 3}


async def test_tokenizing_needs_no_worker_that_computes_prompts() -> None:
    async with pair(fallback=False) as (harness, _, decode, _):
        decode.script("/tokenize", answer(200, {"tokens": [1], "count": 1}))
        assert (await harness.post("/tokenize", {"prompt": "hi"})).status == 200
