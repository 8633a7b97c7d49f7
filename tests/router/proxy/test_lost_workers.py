"""Workers that die, restart or are not there yet: requests are held for them, and poison is told apart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from pdserve.router.config.limits import Limits, Probe
from pdserve.router.config.router import RouterConfig
from pdserve.router.config.tenants import Admission
from tests.support.router.harness import CHAT, PATIENT, Connection, Harness, chat_body, disagg, routed
from tests.support.router.mock_worker import (
    EVENTS,
    MARKS,
    STREAM,
    Gate,
    MockWorker,
    Received,
    Script,
    Wire,
    answer,
    hang,
    stream,
)
from tests.support.router.streams import marked

OFTEN = Probe(interval_s=0.02, timeout_s=0.5)


def waits(seconds: float) -> dict[str, Any]:
    """Settings of a router that holds requests for so long."""
    return {"deadlines": msgspec.structs.replace(PATIENT, wait_for_worker_s=seconds), "probe": OFTEN}


@asynccontextmanager
async def fleet(count: int = 1, *, started: int = 0, **config: Any) -> AsyncIterator[tuple[Harness, Any]]:
    """A router before so many decode workers, of which the first ones have started."""
    made = [MockWorker("decode") for _ in range(count)]
    for number, worker in enumerate(made):
        await worker.start()
        if number >= started:
            await worker.stop()
    urls = tuple(worker.url for worker in made)
    try:
        async with routed(
            RouterConfig(decode=urls, min_prefill_tokens=0, **(waits(10.0) | config))
        ) as harness:
            yield harness, made
    finally:
        for worker in made:
            await worker.stop()


async def lose(harness: Harness, worker: MockWorker) -> None:
    """The worker is killed, and the router has found that."""
    await worker.stop()
    await harness.until(lambda: not harness.router.fleet.by_id[worker.id].ready)


async def until_held(harness: Harness, count: int) -> None:
    await harness.until(lambda: harness.router.gate.queue.waiting == count)


def dies_of(word: str, worker: MockWorker, otherwise: Script) -> Script:
    """The worker is killed by a request that has the word in it."""

    async def run(wire: Wire, request: Received) -> None:
        if word in request.body.decode():
            worker.dying = asyncio.create_task(worker.stop())  # type: ignore[attr-defined]
            await asyncio.Event().wait()
        await otherwise(wire, request)

    return run


def says(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


# --- held for a worker


async def test_requests_are_held_in_their_order_until_the_first_worker_has_joined() -> None:
    async with fleet(admission=Admission(running_per_worker=1)) as (harness, [worker]):
        clients = []
        for number in range(4):
            clients.append(await harness.asking(**says(f"number {number}")))
            await until_held(harness, number + 1)
        await worker.start(worker.port)
        assert [(await client.response()).status for client in clients] == [200] * 4
        asked = [request.json()["messages"][0]["content"] for request in worker.got(CHAT)]
        assert asked == [f"number {number}" for number in range(4)]


async def test_a_model_that_nobody_serves_when_the_first_worker_has_joined_is_unknown() -> None:
    async with fleet() as (harness, [worker]):
        client = await harness.asking(model="x")
        await until_held(harness, 1)
        await worker.start(worker.port)
        assert (await client.response()).status == 404


async def test_a_model_that_no_worker_ever_served_is_unknown_at_once() -> None:
    async with fleet(started=1) as (harness, [worker]):
        harness.router.fleet.members.leave(worker.id)
        refused = await harness.chat(model="x")
        assert (refused.status, refused.error["code"]) == (404, "model_not_found")


async def test_a_model_whose_workers_have_all_left_is_still_known() -> None:
    async with fleet(started=1) as (harness, [worker]):
        harness.router.fleet.members.leave(worker.id)
        client = await harness.asking()
        await until_held(harness, 1)
        harness.router.fleet.members.join(worker.url, "decode")
        assert (await client.response()).status == 200


async def test_an_expected_model_is_held_beside_others_until_its_worker_joins() -> None:
    async with fleet(started=1, models=("m", "n")) as (harness, _):
        client = await harness.asking(model="n")
        await until_held(harness, 1)
        assert (await harness.chat()).status == 200
        late = MockWorker("decode", "n", namespace="of n")
        await late.start()
        try:
            harness.router.fleet.members.join(late.url, "decode")
            assert (await client.response()).status == 200
            assert len(late.got(CHAT)) == 1
        finally:
            await late.stop()


@pytest.mark.parametrize(("knows_salts", "status"), [(True, 200), (False, 503)])
async def test_what_a_held_tenant_may_have_is_read_of_the_workers_that_came(
    monkeypatch: pytest.MonkeyPatch, knows_salts: bool, status: int
) -> None:
    monkeypatch.setenv("PDSERVE_API_KEYS", f"acme={'k' * 20}")
    async with fleet() as (harness, [worker]):
        worker.info |= {"tasks": ["embed"], "takes_salt_header": knows_salts}
        said = {"data": [], "usage": {"prompt_tokens": 2, "total_tokens": 2}}
        worker.script("/v1/embeddings", answer(200, said))
        client = await harness.connect()
        body = json.dumps({"model": "m", "input": "a"}).encode()
        await client.send("/v1/embeddings", body, {"authorization": f"Bearer {'k' * 20}"})
        await until_held(harness, 1)
        await worker.start(worker.port)
        assert (await client.response()).status == status  # else tenants would share a cache
        assert len(worker.got("/v1/embeddings")) == knows_salts
        assert harness.router.gate.tenants.all[0].running == 0


async def test_a_held_request_is_refused_when_its_time_is_over() -> None:
    async with fleet(started=1, **waits(0.05)) as (harness, [worker]):
        await lose(harness, worker)
        refused = await harness.chat()
        assert (refused.status, refused.error["code"]) == (503, "no_healthy_worker")
        assert refused.headers["retry-after"] == "1"


async def test_a_client_that_leaves_is_no_longer_held() -> None:
    async with fleet() as (harness, _):
        client = await harness.asking()
        await until_held(harness, 1)
        client.leave()
        await until_held(harness, 0)
        await harness.settle()
        assert harness.stats.client_aborts["queue"] == 1


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"limits": Limits(held_body_bytes=3000)}, "router_busy"),
        ({"admission": Admission(queue_length=2)}, "no_healthy_worker"),
    ],
)
async def test_what_is_held_is_bounded_in_number_and_bytes(config: dict[str, Any], code: str) -> None:
    async with fleet(**config) as (harness, [worker]):
        clients = [await harness.asking(user="u" * 1000) for _ in range(2)]
        await until_held(harness, 2)
        refused = await harness.chat(user="u" * 1000)
        assert (refused.status, refused.error["code"]) == (503, code)
        await worker.start(worker.port)
        assert [(await client.response()).status for client in clients] == [200, 200]


async def test_a_rolling_restart_of_the_only_worker_fails_no_request() -> None:
    async with fleet(started=1) as (harness, [worker]):
        over, statuses = asyncio.Event(), []

        async def ask() -> None:
            while not over.is_set():
                statuses.append((await harness.chat()).status)

        clients = [asyncio.create_task(ask()) for _ in range(4)]
        for _ in range(3):
            before = len(statuses)
            await harness.until(lambda before=before: len(statuses) > before + 8)  # type: ignore[misc]
            worker.script(CHAT, answer(503, {"error": "stopping"}))
            worker.draining = True
            await harness.until(lambda: harness.router.fleet.by_id[worker.id].stopping)
            await worker.stop()
            worker.draining = False
            await worker.start(worker.port)
        over.set()
        await asyncio.gather(*clients)
        assert set(statuses) == {200}


# --- lost before the first byte


async def sixteen(harness: Harness, worker: MockWorker) -> list[Connection]:
    """Streams that the worker has, and has not begun to answer."""
    worker.script(CHAT, *(hang() for _ in range(16)))
    clients = [await harness.asking(stream=True, user=f"u{n}") for n in range(16)]
    await worker.wait_until(lambda: len(worker.got(CHAT)) == 16)
    return clients


async def test_sixteen_streams_of_a_worker_that_is_killed_go_to_the_other_one() -> None:
    async with fleet(2, started=1) as (harness, [first, second]):
        clients = await sixteen(harness, first)
        await second.start(second.port)
        await harness.until(lambda: harness.router.fleet.by_id[second.id].ready)
        await first.stop()
        assert [(await client.response()).body for client in clients] == [STREAM] * 16


async def test_a_stream_that_can_be_continued_waits_for_the_only_workers_return() -> None:
    async with fleet(started=1) as (harness, [worker]):
        gate = Gate()
        worker.script(CHAT, marked(EVENTS[0] + MARKS[0], gate=gate))
        client = await harness.asking(stream=True, temperature=0)
        await gate.reached.wait()
        await lose(harness, worker)
        await worker.start(worker.port)
        assert (await client.response()).body == STREAM


async def test_a_lost_connection_has_the_worker_probed_at_once() -> None:
    async with fleet(3, started=3, probe=Probe(interval_s=3600.0)) as (harness, workers):
        for worker in workers:
            worker.script(CHAT, dies_of("hi", worker, stream(EVENTS)))
        assert (await harness.chat()).status == 502
        members = harness.router.fleet.by_id
        await harness.until(lambda: sum(members[worker.id].ready for worker in workers) == 1)
        refused = await harness.chat()
        assert refused.error["code"] == "poisoned_request"


# --- poison


@pytest.mark.parametrize("has_idle_connections", [True, False])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_a_request_that_ended_two_workers_reaches_no_third(
    path: str, has_idle_connections: bool
) -> None:
    body = chat_body(**says("poison"), stream=True, max_tokens=5)
    async with fleet(3, started=3) as (harness, workers):
        for worker in workers:
            worker.script(path, *(dies_of("poison", worker, stream(EVENTS)) for _ in range(12)))
        if has_idle_connections:  # one that breaks may also have been stale
            await asyncio.gather(*(harness.post(path, body | says("good")) for _ in range(9)))
            assert all(worker.got(path) for worker in workers)
        await harness.post(path, body)
        refused = await harness.post(path, body)
        assert refused.status == 400
        error = refused.json()["error"]
        assert "Two workers ended" in error["message"]
        assert error.get("code", "poisoned_request") == "poisoned_request"
        assert error["type"] == "invalid_request_error"
        assert harness.stats.poisoned == 1
        reached = [[b"poison" in request.body for request in worker.got(path)] for worker in workers]
        assert sorted(sum(poison) for poison in reached) == [0, 1, 1]
        assert (await harness.post(path, body | says("good"))).status == 200


async def test_a_request_that_ended_a_prefill_worker_and_a_decode_worker_reaches_no_other() -> None:
    async with disagg(1, 2, **waits(10.0)) as (harness, [prefill], decodes):
        prefill.script("/pd/prefill", dies_of("poison", prefill, hang()))
        for decode in decodes:
            decode.script(CHAT, dies_of("poison", decode, stream(EVENTS)))
        refused = await harness.chat(**says("poison"))
        assert (refused.status, refused.error["code"]) == (400, "poisoned_request")
        assert sorted(len(decode.got(CHAT)) for decode in decodes) == [0, 1]


async def test_of_those_that_die_with_poison_only_the_poison_is_refused() -> None:
    bodies = [*(f"good {n}" for n in range(4)), "poison", *(f"good {n}" for n in range(4, 8))]
    async with fleet(3, started=1) as (harness, [first, *others]):
        first.script(CHAT, *(hang() for _ in bodies))
        for worker in others:
            worker.script(CHAT, *(dies_of("poison", worker, stream(EVENTS)) for _ in range(40)))
        clients = {}
        for body in bodies:
            clients[body] = await harness.asking(stream=True, **says(body))
        await first.wait_until(lambda: len(first.got(CHAT)) == len(bodies))
        await first.stop()
        await others[0].start(others[0].port)
        await others[0].wait_until(lambda: any(b"poison" in r.body for r in others[0].got(CHAT)))
        await others[1].start(others[1].port)
        answers = {body: await client.response() for body, client in clients.items()}
        assert {answers[body].status for body in bodies if body != "poison"} == {200}
        assert (await harness.chat(stream=True, **says("poison"))).error["code"] == "poisoned_request"
        assert not any(b"poison" in request.body for request in others[1].requests)
        for body in bodies:
            if body != "poison":
                assert (await harness.chat(stream=True, **says(body))).status == 200
