"""Placement: the planner alone, and over real connections."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdserve.router.api.endpoints import ENDPOINTS
from pdserve.router.config.limits import Probe
from pdserve.router.config.tenants import Tenant
from pdserve.router.fleet.eligible import Eligible, LoadLog
from pdserve.router.fleet.registry import Snapshot
from pdserve.router.fleet.worker import Worker, WorkerInfo
from pdserve.router.metrics.stats import MAX_PLACEMENTS, Stats
from pdserve.router.placement.planner import Plan, Planner, RequestFacts, choose_alternate
from pdserve.router.placement.policies import PolicySettings, make_policy
from pdserve.router.sessions.keys import named
from pdserve.router.sessions.table import SessionEntry
from tests.support.router.harness import Harness, disagg
from tests.support.router.mock_worker import answer
from tests.support.router.tenants import ALICE, BOB, by

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


@pytest.mark.parametrize("cache", ["", "family"])
async def test_what_one_tenant_sent_steers_and_shows_in_anothers_placement_only_if_they_share_a_cache(
    monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    monkeypatch.setenv("PDSERVE_API_KEYS", f"alice={ALICE},bob={BOB}")
    session = {"x-session-id": "the same"}
    tenants = tuple(Tenant(name=name, cache=cache) for name in ("alice", "bob"))
    policies = {"prefill_policy": "cache_aware", "decode_policy": "affinity"}
    async with disagg(prefill=3, decode=3, tenants=tenants, **policies) as (harness, prefills, decodes):
        for worker in prefills:
            worker.script("/pd/prefill", *[answer(200, PREFILLED)] * 12)
        homes, plans = {}, {}
        for key in (ALICE, BOB):
            before = [len(worker.got("/pd/prefill")) for worker in prefills]
            for number in range(5):
                said = await harness.chat(headers=session | by(key), messages=conversation(LONG))
                assert not {"x-pdserve-prefill", "x-pdserve-decode"} & said.headers.keys(), "none are told"
                plans.setdefault((key, number), said.headers["x-pdserve-plan"])
            asked = zip(prefills, before, strict=True)
            homes[key] = {worker.id for worker, count in asked if len(worker.got("/pd/prefill")) > count}
        assert len(homes[ALICE]) == len(homes[BOB]) == 1, "each keeps to where its prompt is"
        if cache:
            assert placements(harness, "prefill") == {"cache-aware": 1, "prefix": 9}
            assert homes[ALICE] == homes[BOB]
            return
        assert placements(harness, "prefill") == {"cache-aware": 2, "prefix": 8}
        assert placements(harness, "decode") == {"rendezvous": 2, "session": 8}
        assert plans[BOB, 0] == plans[ALICE, 0], "word for word what nobody's prompt gets"
        assert sum(len(worker.got("/pd/settled")) for worker in decodes) == 8, "of no turn of hers"


PREFILL = Worker("prefill", "http://p:1")
D1, D2 = Worker("decode", "http://d1:1"), Worker("decode", "http://d2:1")
AGG = Worker("agg", "http://a:1")
CHAT = "/v1/chat/completions"


def plan(
    facts: RequestFacts,
    prefill: tuple[Worker, ...] = (PREFILL,),
    decode: tuple[Worker, ...] = (D1, D2),
    **more: Any,
) -> Plan:
    last = more.pop("last", None)
    planner = Planner(
        prefill_policy=make_policy("least_loaded", PolicySettings()),
        decode_policy=make_policy("affinity", PolicySettings()),
        prefill_endpoints=frozenset([CHAT]),
        **more,
    )
    return planner.plan(
        facts,
        Snapshot(
            models=("m",),
            prefill=Eligible(prefill, LoadLog()),
            decode=Eligible(decode, LoadLog()),
            members=frozenset(w.id for w in (*prefill, *decode)),
        ),
        last,
    )


@pytest.mark.parametrize(
    ("facts", "more", "why"),
    [
        (RequestFacts(ENDPOINTS[CHAT]), {"prefill": ()}, "prefill=none-ready"),
        (RequestFacts(ENDPOINTS["/generate"]), {}, "prefill=no-stage"),
        pytest.param(
            RequestFacts(ENDPOINTS[CHAT], has_media=True),
            {},
            "prefill=media",
            marks=pytest.mark.model_support(
                "multimodal",
                "disaggregated",
                refused="x-pdserve-plan: prefill=media (the decode worker computes it)",
            ),
        ),
        (
            RequestFacts(ENDPOINTS[CHAT], prompt_tokens_estimate=9),
            {"min_prefill_tokens": 10},
            "prefill=direct(uncached=9<10)",
        ),
        (RequestFacts(ENDPOINTS[CHAT]), {"decode": (AGG,)}, "prefill=agg"),
    ],
)
def test_the_decode_worker_does_it_alone(facts: RequestFacts, more: dict[str, Any], why: str) -> None:
    made = plan(facts, **more)
    assert made.prefill is None
    assert why in made.reasons


def test_media_that_all_workers_can_name_go_through_the_prefill_stage() -> None:
    def worker(role: Any, *, names_media: bool) -> Worker:
        made = Worker(role, f"http://{role}{names_media}:1")
        made.info = WorkerInfo(role, "m", names_media=names_media)
        return made

    facts = RequestFacts(ENDPOINTS[CHAT], has_media=True)
    prefill, decode = (worker(role, names_media=True) for role in ("prefill", "decode"))
    assert plan(facts, (prefill,), (decode,)).prefill is prefill
    assert plan(facts, (prefill,), (decode,), min_prefill_tokens=10_000).prefill is prefill
    for pair in (
        (prefill, worker("decode", names_media=False)),
        (worker("prefill", names_media=False), decode),
    ):
        made = plan(facts, pair[:1], pair[1:])
        assert (made.prefill, made.reasons[-1]) == (None, "prefill=media")


LAST = SessionEntry("r1", D2.id, 0.0, answered=True)
TURN = RequestFacts(ENDPOINTS[CHAT], session=named("s"), is_turn=True)


def test_no_wait_for_a_turn_that_is_still_being_answered() -> None:
    made = plan(TURN, last=SessionEntry("r1", D2.id, 0.0))
    assert (made.decode, made.settle) == (D2, None)


def test_the_alternate_is_the_least_loaded_that_was_not_tried() -> None:
    a, b, c = (Worker("decode", f"http://{name}:1") for name in "abc")
    a.in_flight, b.in_flight, c.in_flight = 0, 5, 3
    assert choose_alternate((a, b, c), [a.id]) is c
    assert choose_alternate((a,), [a.id]) is None


@pytest.mark.parametrize("path", ["/tokenize", "/v1/embeddings", "/v1/kv/hints"])
def test_what_generates_nothing_goes_where_the_session_is_and_is_no_turn_of_it(path: str) -> None:
    facts = RequestFacts(ENDPOINTS[path], session=named("s"))
    made = plan(facts, last=LAST)
    assert (made.decode, made.turn) == (D2, 0)
    D2.in_flight = 50
    try:
        made = plan(facts, last=LAST)
    finally:
        D2.in_flight = 0
    assert (made.decode, made.settle) == (D1, None)
