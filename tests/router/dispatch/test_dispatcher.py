"""The router before scripted workers: what is sent where, and what becomes of every fault."""

from __future__ import annotations

import asyncio
import json

import pytest

from pdserve.router.config.limits import Limits
from pdserve.router.config.router import RouterConfig, Session
from tests.support.router import mock_worker as mock
from tests.support.router.harness import CHAT, PATIENT, chat_body, disagg, routed
from tests.support.router.mock_worker import ANSWER, EVENTS, REPORT, STREAM, Gate, MockWorker, Script, answer


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


@pytest.mark.parametrize("trouble", [mock.close(), answer(503, {"detail": "draining"}), answer(200, {})])
async def test_a_failing_prefill_worker_is_left_alone_after_a_few_requests(trouble: Script) -> None:
    async with disagg() as (harness, [prefill], _):
        prefill.script("/pd/prefill", *[trouble] * 3)
        for _ in range(5):
            assert (await harness.chat()).status == 200
        assert len(prefill.got("/pd/prefill")) == 3
        assert (await harness.chat()).headers["x-pdserve-plan"].endswith("prefill=none-ready")


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


async def test_no_worker_ready_is_a_503_that_says_when_to_come_back() -> None:
    async with disagg() as (harness, _, [decode]):
        harness.router.fleet.on_probe_not_ready(harness.router.fleet.by_id[decode.id])
        response = await harness.chat()
        assert (response.status, response.headers["retry-after"]) == (503, "1")
        assert response.error["code"] == "no_healthy_worker"


async def test_other_methods_are_refused() -> None:
    async with disagg() as (harness, _, _):
        response = await harness.get(CHAT)
        assert (response.status, response.headers["allow"]) == (405, "POST")
        assert response.error


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
        assert asked.json() == {"request_id": first.headers["x-request-id"], "timeout_s": 1.0}
        assert len(prefill.got("/pd/prefill")) == 5


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


@pytest.mark.parametrize("path", ["/tokenize", "/v1/detokenize"])
async def test_tokenizing_asks_the_sessions_worker_alone_and_the_turn_after_it_waits_for_the_turn_before(
    path: str,
) -> None:
    async with disagg(decode=3) as (harness, [prefill], decodes):
        first = await harness.chat(headers=SESSION)
        between = await harness.post(path, {"prompt": "hi", "rid": ["a"], "input_ids": [[1]]}, SESSION)
        assert between.status == 200
        assert between.headers["x-pdserve-decode"] == first.headers["x-pdserve-decode"]
        assert len(prefill.requests) == 1
        await harness.chat(headers=SESSION)
        [asked] = [request.json() for d in decodes for request in d.got("/pd/settled")]
        assert asked["request_id"] == first.headers["x-request-id"]


async def test_a_failed_turn_leaves_no_trace_in_the_session_table() -> None:
    async with disagg(session=Session(sources=("user",))) as (harness, _, [decode]):
        decode.script(CHAT, answer(400, {"message": "no"}))
        await harness.chat(user="u")
        assert len(harness.router.dispatcher.placer.sessions) == 0
