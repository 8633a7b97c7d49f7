from __future__ import annotations

from typing import Any

import pytest

from pdserve.router.api.endpoints import ENDPOINTS
from pdserve.router.api.errors import NoWorkerError
from pdserve.router.fleet.registry import Snapshot
from pdserve.router.fleet.worker import Worker, WorkerInfo
from pdserve.router.placement.planner import Plan, Planner, RequestFacts, Settle, choose_alternate
from pdserve.router.placement.policies import PolicySettings, make_policy
from pdserve.router.sessions.keys import named
from pdserve.router.sessions.table import SessionEntry

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
            prefill=prefill,
            decode=decode,
            members=frozenset(w.id for w in (*prefill, *decode)),
        ),
        last,
    )


def test_a_prompt_is_prefilled_by_one_worker_and_decoded_by_another() -> None:
    assert plan(RequestFacts(ENDPOINTS[CHAT])) == Plan(
        decode=D1,
        prefill=PREFILL,
        reasons=("decode=least-loaded", "prefill=least-loaded"),
        causes=(("decode", "least-loaded"), ("prefill", "least-loaded")),
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


def test_no_worker_is_a_503() -> None:
    with pytest.raises(NoWorkerError) as caught:
        plan(RequestFacts(ENDPOINTS[CHAT]), decode=())
    assert caught.value.status == 503


LAST = SessionEntry("r1", D2.id, 0.0, answered=True)
TURN = RequestFacts(ENDPOINTS[CHAT], session=named("s"))


def test_a_sessions_next_turn_goes_back_and_waits_for_its_pages_before_prefill() -> None:
    made = plan(TURN, last=LAST)
    assert made.decode is D2
    assert made.settle == Settle(D2, "r1")


def test_no_wait_when_the_worker_that_has_the_pages_does_it_alone() -> None:
    made = plan(TURN, prefill=(), last=LAST)
    assert made.decode is D2
    assert made.settle is None


def test_no_wait_for_a_turn_that_is_still_being_answered() -> None:
    made = plan(TURN, last=SessionEntry("r1", D2.id, 0.0))
    assert made.decode is D2
    assert made.settle is None


@pytest.mark.parametrize("path", ["/tokenize", "/v1/embeddings"])
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


def test_no_wait_for_a_worker_that_is_gone() -> None:
    assert plan(TURN, decode=(D1,), last=LAST).settle is None


def test_a_session_that_moves_waits_for_the_worker_it_leaves() -> None:
    D2.in_flight = 50
    try:
        made = plan(TURN, prefill=(), last=LAST)
    finally:
        D2.in_flight = 0
    assert made.decode is D1
    assert made.settle == Settle(D2, "r1")


def test_the_alternate_is_the_least_loaded_that_was_not_tried() -> None:
    a, b, c = (Worker("decode", f"http://{name}:1") for name in "abc")
    a.in_flight, b.in_flight, c.in_flight = 0, 5, 3
    assert choose_alternate((a, b, c), [a.id]) is c
    assert choose_alternate((a,), [a.id]) is None
