"""Placement over real connections: what was learnt from one request decides the next."""

from __future__ import annotations

import asyncio
import json

import pytest

from pdserve.router.config.limits import Probe
from pdserve.router.config.tenants import Tenant
from pdserve.router.metrics.stats import MAX_PLACEMENTS, Stats
from tests.support.router.harness import Harness, disagg
from tests.support.router.mock_worker import Gate, answer, hang

ALICE, BOB = "alice-" + "a" * 20, "bob-" + "b" * 20
LONG = "word " * 1000
PREFILLED = {
    "prompt_tokens": 1000,
    "published_pages": 60,
    "missing_pages": 0,
    "cached": {"device": 0, "host": 0},
}


def conversation(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


async def test_the_next_turn_of_a_session_goes_straight_to_its_decode_worker() -> None:
    async with disagg(decode=3, min_prefill_tokens=300) as (harness, [prefill], decodes):
        session = {"x-session-id": "s"}
        prefill.script("/pd/prefill", answer(200, PREFILLED))
        first = await harness.chat(headers=session, messages=conversation(LONG))
        assert len(prefill.got("/pd/prefill")) == 1
        second = await harness.chat(headers=session, messages=conversation(LONG, "hello", "more"))
        assert second.headers["x-pdserve-decode"] == first.headers["x-pdserve-decode"]
        assert "prefill=direct(uncached=" in second.headers["x-pdserve-plan"]
        assert len(prefill.got("/pd/prefill")) == 1
        assert not [worker for worker in decodes if worker.got("/pd/settled")]
        await harness.chat(headers=session, messages=conversation(LONG, "hello", LONG * 2))
        assert len(prefill.got("/pd/prefill")) == 2


async def test_a_prompt_that_was_tokenized_is_computed_all_the_same() -> None:
    async with disagg(min_prefill_tokens=300) as (harness, [prefill], [decode]):
        worker = harness.router.fleet.by_id[decode.id]
        gate = Gate()
        decode.script("/tokenize", hang(gate))
        client = await harness.connect()
        await client.send("/tokenize", json.dumps({"model": "m", "prompt": LONG}).encode())
        await gate.reached.wait()
        assert (worker.in_flight, worker.queued_tokens) == (1, 0)
        gate.open.set()
        client.leave()
        await harness.post("/tokenize", {"model": "m", "prompt": LONG})
        response = await harness.post("/v1/completions", {"model": "m", "prompt": LONG})
        assert "prefill=least-loaded" in response.headers["x-pdserve-plan"]
        assert len(prefill.got("/pd/prefill")) == 1


async def test_a_prompt_that_begins_alike_goes_to_the_worker_that_has_it() -> None:
    async with disagg(prefill=3, prefill_policy="cache_aware") as (harness, prefills, _):
        for worker in prefills:
            worker.script("/pd/prefill", *[answer(200, PREFILLED | {"missing_pages": 1})] * 4)
        homes = set()
        for i in range(4):
            response = await harness.chat(messages=conversation(LONG + str(i)))
            homes.add(response.headers["x-pdserve-prefill"])
        assert len(homes) == 1


async def test_workers_that_say_how_busy_they_are_get_less() -> None:
    probe = Probe(interval_s=0.02)
    async with disagg(decode=2, decode_policy="load_aware", probe=probe) as (harness, _, [busy, free]):
        free.load = {"running_requests": 1}
        busy.load = {"running_requests": 9, "waiting_requests": 4, "queued_tokens": 5000}
        known = harness.router.fleet.by_id
        while not (known[busy.id].queued_tokens and known[free.id].elsewhere):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)
        for _ in range(4):
            assert (await harness.chat()).headers["x-pdserve-decode"] == free.id


async def test_prompts_that_wait_are_counted_and_not_forgotten() -> None:
    async with disagg(min_prefill_tokens=10_000) as (harness, _, [decode]):
        decode.script("/v1/chat/completions", answer(200, {}), answer(500, {}), answer(400, {}))
        for _ in range(3):
            await harness.chat(messages=conversation(LONG))
        await harness.settle()
        assert [worker.queued_tokens for worker in harness.router.fleet.workers] == [0, 0]


def placements(harness: Harness, role: str) -> dict[str, int]:
    return {why: count for (who, why), count in harness.stats.placements.items() if who == role}


async def test_what_decided_is_counted_for_each_role() -> None:
    async with disagg(prefill=2, prefill_policy="cache_aware", min_prefill_tokens=100) as (
        harness,
        prefills,
        _,
    ):
        for worker in prefills:
            worker.script("/pd/prefill", *[answer(200, PREFILLED)] * 4)
        session = {"x-session-id": "s"}
        await harness.chat(headers=session, messages=conversation(LONG))
        await harness.chat(headers=session, messages=conversation(LONG, "hello", "more"))
        await harness.chat(messages=conversation(LONG + "other"))
        assert placements(harness, "decode") == {"rendezvous": 1, "session": 1, "least-loaded": 1}
        assert placements(harness, "prefill") == {"cache-aware": 1, "direct": 1, "prefix": 1}
        text = (await harness.get("/metrics")).body.decode()
        assert 'pdserve_router_placements_total{reason="prefix",role="prefill"} 1.0' in text


def test_words_of_other_packages_policies_cannot_fill_the_metrics() -> None:
    stats = Stats()
    for number in range(10 * MAX_PLACEMENTS):
        stats.on_placed("decode", f"because-{number}")
    assert len(stats.placements) == MAX_PLACEMENTS + 1
    assert stats.placements["decode", "other"] == 9 * MAX_PLACEMENTS


async def test_what_one_tenant_sent_neither_steers_nor_shows_in_anothers_placement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PDSERVE_API_KEYS", f"alice={ALICE},bob={BOB}")
    session = {"x-session-id": "the same"}
    async with disagg(prefill=3, decode=3, prefill_policy="cache_aware", decode_policy="affinity") as (
        harness,
        prefills,
        decodes,
    ):
        for worker in prefills:
            worker.script("/pd/prefill", *[answer(200, PREFILLED)] * 12)

        async def chat(key: str) -> dict[str, str]:
            by = {"authorization": f"Bearer {key}"}
            return (await harness.chat(headers=session | by, messages=conversation(LONG))).headers

        async def homes(key: str, count: int) -> set[str]:
            """The prefill workers of so many requests. Tenants are not told."""
            before = [len(worker.got("/pd/prefill")) for worker in prefills]
            for _ in range(count):
                assert not {"x-pdserve-prefill", "x-pdserve-decode"} & (await chat(key)).keys()
            asked = zip(prefills, before, strict=True)
            return {worker.id for worker, count in asked if len(worker.got("/pd/prefill")) > count}

        first = await chat(ALICE)
        home = {worker.id for worker in prefills if worker.got("/pd/prefill")}
        assert await homes(ALICE, 4) == home
        assert placements(harness, "prefill") == {"cache-aware": 1, "prefix": 4}
        assert sum(len(worker.got("/pd/settled")) for worker in decodes) == 4
        before = [len(worker.got("/pd/prefill")) for worker in prefills]
        others = await chat(BOB)
        asked = zip(prefills, before, strict=True)
        home = {worker.id for worker, count in asked if len(worker.got("/pd/prefill")) > count}
        assert placements(harness, "prefill") == {"cache-aware": 2, "prefix": 4}
        assert placements(harness, "decode") == {"rendezvous": 2, "session": 4}
        assert others["x-pdserve-plan"] == first["x-pdserve-plan"]  # word for word what nobody's prompt gets
        # no turn of hers is asked for
        assert sum(len(worker.got("/pd/settled")) for worker in decodes) == 4
        assert await homes(BOB, 4) == home


async def test_tenants_of_one_cache_share_what_is_known_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_API_KEYS", f"alice={ALICE},bob={BOB}")
    family = tuple(Tenant(name=name, cache="family") for name in ("alice", "bob"))
    async with disagg(prefill=3, prefill_policy="cache_aware", tenants=family) as (harness, prefills, _):
        for worker in prefills:
            worker.script("/pd/prefill", *[answer(200, PREFILLED)] * 4)
        for key in (ALICE, BOB):
            by = {"authorization": f"Bearer {key}"}
            await harness.chat(headers=by, messages=conversation(LONG))
        assert placements(harness, "prefill") == {"cache-aware": 1, "prefix": 1}
