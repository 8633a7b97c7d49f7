"""The router before scripted workers: what is sent where, and what becomes of every fault."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.config.limits import Limits, Probe
from pdserve.router.config.router import RouterConfig, Session
from pdserve.router.placement.placer import Placer
from pdserve.router.placement.planner import Plan
from pdserve.router.proxy.failures import KEPT_REQUESTS, KEPT_S, RetryBudget
from tests.support.router import mock_worker as mock
from tests.support.router.harness import CHAT, PATIENT, Harness, chat_body, disagg, routed
from tests.support.router.mock_worker import (
    ANSWER,
    EVENTS,
    REPORT,
    STREAM,
    Gate,
    MockWorker,
    answer,
    hang,
    held,
    stream,
    workers,
)


@pytest.mark.parametrize("endpoint", [CHAT, "/v1/completions", "/generate"])
async def test_prefill_then_decode_with_the_clients_bytes(endpoint: str) -> None:
    async with disagg() as (harness, [prefill], [decode]):
        body = b'{ "model":"m",\n "messages": [], "prompt": [[1,2],[3]], "n": 2, "\\u00e9": 1e40}'
        response = await harness.post(endpoint, body, {"x-request-id": "abc-1"})
        assert (response.status, response.body) == (200, ANSWER)
        told = {
            name: response.headers[f"x-{name}"]
            for name in ("pdserve-prefill", "pdserve-decode", "pdserve-plan")
        }
        assert told == {
            "pdserve-prefill": prefill.id,
            "pdserve-decode": decode.id,
            "pdserve-plan": "decode=least-loaded, prefill=least-loaded, stage=ok",
        }
        [first] = prefill.requests
        assert first.target == f"/pd/prefill?endpoint={endpoint}"
        [second] = decode.requests
        assert second.target == endpoint
        for request in (first, second):
            assert request.body == body
        for headers in (first.headers, second.headers, response.headers):
            assert headers["x-request-id"] == "abc-1"
            assert headers["content-type"] == "application/json"


async def test_a_stream_is_relayed_byte_for_byte() -> None:
    async with disagg() as (harness, _, [decode]):
        odd = [STREAM[:7], STREAM[7:100], STREAM[100:333], STREAM[333:]]
        decode.script(
            CHAT,
            mock.stream(EVENTS),
            mock.stream(odd),
            mock.stream([b": comment\r\n\r\n", b"no event at all"]),
        )
        response = await harness.chat(stream=True)
        assert response.body == STREAM
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert (await harness.chat(stream=True)).body == STREAM
        assert (await harness.chat(stream=True)).body == b": comment\r\n\r\nno event at all"


async def test_request_ids_are_checked_or_made() -> None:
    async with disagg() as (harness, _, [decode]):
        made = (await harness.chat()).headers["x-request-id"]
        for bad in ("a b", "x" * 129, "ü", ""):
            response = await harness.chat(headers={"x-request-id": bad})
            assert response.headers["x-request-id"] not in (bad, made)
            assert decode.requests[-1].headers["x-request-id"] == response.headers["x-request-id"]
        assert len(made) >= 16


async def test_a_prefill_worker_with_all_its_connections_in_use_is_not_held_to_have_failed() -> None:
    async with disagg(limits=Limits(worker_connections=1)) as (harness, [prefill], _):
        gate = Gate()
        prefill.script("/pd/prefill", mock.hang(gate))
        holding = asyncio.create_task(harness.chat())
        await gate.reached.wait()
        for _ in range(4):
            assert (await harness.chat()).headers["x-pdserve-plan"].endswith("stage=busy")
        assert harness.router.fleet.by_id[prefill.id].circuit.failures == 0
        gate.open.set()
        assert (await holding).body == ANSWER


async def test_pages_that_were_not_published_in_time_do_not_hold_up_decode() -> None:
    async with disagg() as (harness, [prefill], _):
        prefill.script("/pd/prefill", answer(200, REPORT | {"missing_pages": 2, "new_field": [1]}))
        response = await harness.chat()
        assert response.headers["x-pdserve-plan"].endswith("stage=partial")
        assert harness.stats.missing_pages == 2
        assert harness.stats.cached_tokens == {"device": 8, "host": 0, "pool": 16}
        found = response.headers["x-pdserve-prefill-cached"]
        assert found == "device=8, host=0, pool=16, computed=16"


async def test_the_decode_worker_gets_the_token_that_was_sampled_behind_the_prompt() -> None:
    async with disagg() as (harness, [prefill], [decode]):
        told = ["42x9f0c", "", "42\r\nset-cookie: a=b", "x" * 65]
        prefill.script("/pd/prefill", *[answer(200, REPORT | {"first": each}) for each in told])
        for each in ("42x9f0c", None, None, None):
            await harness.chat()
            headers = decode.requests[-1].headers
            assert headers.get("x-pdserve-first") == each
            assert "set-cookie" not in headers


async def test_why_pages_were_missed_is_told_and_no_worker_writes_other_headers_by_it() -> None:
    async with disagg() as (harness, [prefill], _):
        told = ["evicted=16;age_s=3.5", "", "evicted=16\r\nset-cookie: a=b", "x" * 513]
        prefill.script("/pd/prefill", *[answer(200, REPORT | {"missed": each}) for each in told])
        answers = [await harness.chat() for _ in told]
        assert [one.headers.get("x-pdserve-miss") for one in answers] == [
            "evicted=16;age_s=3.5",
            None,
            None,
            None,
        ]
        assert not any("set-cookie" in one.headers for one in answers)


async def test_the_decode_worker_is_told_what_prefill_found_and_tells_what_it_found() -> None:
    async with disagg() as (harness, [prefill], [decode]):
        found = "x-pdserve-cached: device=0, host=0, pool=32\r\n"
        decode.script(CHAT, mock.answered_with(found))
        reports = [[[8, 0, 16], [0, 0, 1]], [], [[1, 2, 3]] * 2000]
        prefill.script("/pd/prefill", *[answer(200, REPORT | {"cached_by_prompt": each}) for each in reports])
        assert (await harness.chat()).headers["x-pdserve-cached"] == "device=0, host=0, pool=32"
        await harness.chat()
        await harness.chat(headers={"x-pdserve-prefilled": "9/9/9"})
        told = [request.headers.get("x-pdserve-prefilled") for request in decode.got(CHAT)]
        assert told == ["8/0/16,0/0/1", None, None]
        await prefill.stop()
        await harness.chat()
        assert "x-pdserve-prefilled" not in decode.got(CHAT)[-1].headers


async def test_the_decode_worker_is_told_which_tokens_the_prefill_worker_used() -> None:
    """And no client tells it."""
    async with disagg() as (harness, [prefill], [decode]):
        reports = [{"turns": "1f4"}, {"turns": "0"}, {"turns": ""}, {}]
        prefill.script("/pd/prefill", *[answer(200, REPORT | one) for one in reports])
        for _ in reports:
            await harness.chat(headers={"x-pdserve-turns": "ff"})
        told = [request.headers.get("x-pdserve-turns") for request in decode.got(CHAT)]
        assert told == ["1f4", "0", "0", "0"]  # an older prefill worker encodes the text
        await prefill.stop()
        await harness.chat(headers={"x-pdserve-turns": "ff"})
        assert "x-pdserve-turns" not in decode.got(CHAT)[-1].headers


@pytest.mark.parametrize(
    ("body", "status", "code", "said"),
    [
        (b"{", 400, None, "not valid JSON"),
        (b"[]", 400, None, "must be a JSON object"),
        (b'{"model":"gpt-x","messages":[]}', 404, "model_not_found", "'m'"),
        (b'{"model":"m","x":"' + b"y" * 2000 + b'"}', 413, "body_too_large", "1024 bytes"),
    ],
)
async def test_bad_requests_reach_no_worker(body: bytes, status: int, code: str | None, said: str) -> None:
    async with disagg(limits=Limits(body_bytes=1024)) as (harness, [prefill], [decode]):
        response = await harness.post(CHAT, body)
        assert (response.status, response.error["code"]) == (status, code)
        assert said in response.error["message"]
        assert response.headers["x-request-id"]
        assert prefill.requests == decode.requests == []


async def test_a_body_that_turns_out_too_large_is_refused() -> None:
    async with disagg(limits=Limits(body_bytes=100_000)) as (harness, _, _):
        client = await harness.connect()
        piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n"
        client.writer.write(head + piece * 3 + b"0\r\n\r\n")
        assert (await client.response()).status == 413


async def test_a_length_with_more_digits_than_a_number_may_have_is_understood() -> None:
    async with disagg() as (harness, _, _):
        body = json.dumps(chat_body()).encode()
        length = {"content-length": "0" * 5000 + str(len(body))}
        assert (await harness.post(CHAT, body, length)).body == ANSWER


async def test_aggregated_workers_get_the_request_alone() -> None:
    agg = MockWorker("agg")
    async with mock.workers(agg), routed(RouterConfig(agg=(agg.url,), deadlines=PATIENT)) as harness:
        response = await harness.chat(stream=True)
        assert response.body == STREAM
        assert response.headers["x-pdserve-plan"] == "decode=least-loaded, prefill=agg"
        assert [r.path for r in agg.requests] == [CHAT]


SESSION = {"x-session-id": "s1"}


async def test_a_session_goes_back_to_its_worker_once_its_pages_are_settled() -> None:
    async with disagg(decode=3) as (harness, [prefill], decodes):
        first = await harness.chat(headers=SESSION)
        home = next(d for d in decodes if d.id == first.headers["x-pdserve-decode"])
        for _ in range(3):
            await harness.chat()
        second = await harness.chat(headers=SESSION)
        assert second.headers["x-pdserve-decode"] == home.id
        assert "decode=session" in second.headers["x-pdserve-plan"]
        assert "settle=settled" in second.headers["x-pdserve-plan"]
        [asked] = home.got("/pd/settled")
        assert asked.json()["request_id"] == first.headers["x-request-id"]
        assert 0 < asked.json()["timeout_s"] < 1.0  # from the answer on
        assert len(prefill.got("/pd/prefill")) == 5


async def test_a_turn_that_comes_late_does_not_ask_whether_the_last_ones_pages_are_settled() -> None:
    soon = msgspec.structs.replace(PATIENT, settle_s=1e-6)
    async with disagg(deadlines=soon) as (harness, _, [decode]):
        await harness.chat(headers=SESSION)
        await asyncio.sleep(0.005)  # late: the loop's clock has steps of a millisecond
        second = await harness.chat(headers=SESSION)
        assert "settle=past" in second.headers["x-pdserve-plan"]
        assert decode.got("/pd/settled") == []


@pytest.mark.parametrize("prefill", [0, 1])
async def test_a_session_leaves_a_drained_worker_once_its_pages_are_settled(prefill: int) -> None:
    async with disagg(prefill=prefill, decode=2) as (harness, _, decodes):
        first = await harness.chat(headers=SESSION)
        [home, other] = sorted(decodes, key=lambda worker: worker.id != first.headers["x-pdserve-decode"])
        harness.router.fleet.members.drain(home.id, True)
        gate = Gate()
        home.script("/pd/settled", mock.stream([b'{"known":true,"settled":true}'], gate, gate_after=0))
        moved = asyncio.create_task(harness.chat(headers=SESSION))
        await gate.reached.wait()
        assert other.requests == []
        gate.open.set()
        second = await moved
        assert second.headers["x-pdserve-decode"] == other.id
        assert "settle=settled" in second.headers["x-pdserve-plan"]
        [asked] = home.got("/pd/settled")
        assert asked.json()["request_id"] == first.headers["x-request-id"]


async def test_a_failed_turn_leaves_no_trace_in_the_session_table() -> None:
    async with disagg(session=Session(sources=("user",))) as (harness, _, [decode]):
        decode.script(CHAT, answer(400, {"message": "no"}))
        await harness.chat(user="u")
        assert len(harness.router.proxy.placer.sessions) == 0


# --- A long prompt's decode worker is asked to pull while prefill computes, and nothing depends on it


LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "word " * 1000}]}
AHEAD = {"pull_ahead_tokens": 500}


async def test_the_decode_worker_pulls_while_prefill_computes_and_is_hung_up_on_after_it() -> None:
    async with disagg(**AHEAD) as (harness, [prefill], [decode]):
        computing, pulling = Gate(), Gate()
        prefill.script("/pd/prefill", stream([json.dumps(REPORT).encode()], computing, gate_after=0))
        decode.script("/pd/pull", hang(pulling))
        client = await harness.asking(**LONG)
        await computing.reached.wait()
        await pulling.reached.wait()
        [asked] = decode.requests
        assert asked.target == f"/pd/pull?endpoint={CHAT}"
        assert asked.body == prefill.requests[0].body
        computing.open.set()
        response = await client.response()
        assert response.body == ANSWER
        await decode.wait_until(lambda: decode.disconnected == 1)
        await harness.until(lambda: harness.stats.pull_ahead == {"ok": 1})


@pytest.mark.parametrize("settings", [AHEAD, {}, {"pull_ahead_tokens": 0}, {"pull_ahead_tokens": 2000}])
async def test_shorter_prompts_and_those_that_prefill_answers_at_once_are_not_pulled_ahead(
    settings: dict[str, int],
) -> None:
    async with disagg(**settings) as (harness, _, [decode]):
        await harness.chat(**LONG)
        assert [request.path for request in decode.requests] == [CHAT]


# --- Workers that say that they stop: nothing new is sent there, and what they have they finish


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
        for worker in prefills:
            worker.script("/pd/prefill", held(gate, REPORT))
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


# --- Elastic workers behind a router on a real port: each request has a worker for each role


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Duties follow the load at once."""
    monkeypatch.setattr("pdserve.router.placement.elastic.WINDOW_S", 0.05)
    monkeypatch.setattr("pdserve.router.placement.elastic.DWELL_S", 0.0)


@asynccontextmanager
async def elastic(count: int = 2, **config: Any) -> AsyncIterator[tuple[Harness, list[MockWorker]]]:
    made = [MockWorker("elastic") for _ in range(count)]
    async with workers(*made):
        settings = {"elastic": tuple(one.url for one in made), "deadlines": PATIENT}
        settings |= {"min_prefill_tokens": 0} | config
        async with routed(RouterConfig(**settings)) as harness:
            yield harness, made


@pytest.mark.usefixtures("quick")
async def test_one_worker_prefills_and_the_other_one_answers() -> None:
    async with elastic() as (harness, made):
        response = await harness.chat()
        assert response.status == 200
        by_id = {worker.id: worker for worker in made}
        prefill = by_id[response.headers["x-pdserve-prefill"]]
        decode = by_id[response.headers["x-pdserve-decode"]]
        assert prefill is not decode
        assert [one.path for one in prefill.requests] == ["/pd/prefill"]
        assert [one.path for one in decode.requests] == [CHAT]
        ready = (await harness.get("/ready")).json()
        assert ready["ready"] is True
        assert ready["mode"] == "disagg"
        assert {worker["role"] for worker in ready["workers"]} == {"elastic"}
        values = harness.router.own_metrics().values
        assert values["worker_prefills"] == {(prefill.id, "elastic"): 1, (decode.id, "elastic"): 0}
        assert set(values["workers_wanted"]) == {("m", "elastic")}


@pytest.mark.usefixtures("quick")
async def test_the_last_worker_does_both_and_a_lost_one_is_replaced() -> None:
    async with elastic() as (harness, made):
        response = await harness.chat()
        decode = next(worker for worker in made if worker.id == response.headers["x-pdserve-decode"])
        await decode.stop()
        for _ in range(3):
            response = await harness.chat()
            assert response.status == 200
            assert response.headers["x-pdserve-decode"] != decode.id


@pytest.mark.usefixtures("quick")
async def test_prefills_are_counted_apart_from_answers() -> None:
    async with elastic() as (harness, made):
        gate = Gate()
        for worker in made:
            worker.script("/pd/prefill", hang(gate))
        asking = await harness.asking()
        await gate.reached.wait()
        loads = sorted((w.in_flight, w.prefilling, w.answering) for w in harness.router.fleet.workers)
        assert loads == [(1, 0, 1), (1, 1, 0)]
        asking.leave()
        await harness.settle()
        assert [w.prefilling for w in harness.router.fleet.workers] == [0, 0]


# --- The plan's words on their way into a header


async def test_a_policy_that_gives_odd_reasons_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Placer.plan

    def odd(self: Placer, *facts: object) -> Plan:
        made = plan(self, *facts)  # type: ignore[arg-type]
        return msgspec.structs.replace(made, reasons=(*made.reasons, "why=\r\nx: y"))

    monkeypatch.setattr(Placer, "plan", odd)
    async with disagg() as (harness, _, _):
        answer = await harness.chat()
        assert (answer.status, answer.body) == (200, ANSWER)
        assert "why=??x: y" in answer.headers["x-pdserve-plan"]


@given(st.floats(0, 1), st.floats(0, 20), st.lists(st.tuples(st.floats(0, 2), st.booleans()), max_size=300))
def test_retries_never_exceed_what_was_paid_in(
    ratio: float, min_per_s: float, steps: list[tuple[float, bool]]
) -> None:
    budget, now_s, requests, retries = RetryBudget(0.0, ratio, min_per_s), 0.0, 0, 0
    for passed_s, is_retry in steps:
        now_s += passed_s
        if is_retry:
            retries += budget.take(now_s)
        else:
            budget.requests += 1
            requests += 1
        assert budget.balance >= 0
        assert retries <= requests * ratio + (now_s + KEPT_S) * min_per_s + 1e-6
        assert budget.balance <= KEPT_S * min_per_s + KEPT_REQUESTS * ratio + 1e-6


def test_a_spent_budget_comes_back_with_time_and_requests() -> None:
    budget = RetryBudget(0.0, 0.5, 0.1)
    assert budget.take(0.0)
    assert not budget.take(1.0)
    assert budget.take(10.0)
    assert not budget.take(10.0)
    budget.requests += 1
    budget.requests += 1
    assert budget.take(10.0)
