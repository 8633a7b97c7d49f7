"""A worker that says what cannot be: it costs its own answer, and nothing of the router or of others."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.router.metrics.exposition import exposition
from pdserve.router.request.stream_marks import StreamMarks
from pdserve.router.request.token_usage import Meter
from tests.support.router.harness import CHAT, Harness, chat_body, disagg
from tests.support.router.mock_worker import (
    ANSWER,
    DONE,
    EVENTS,
    REPORT,
    MockWorker,
    answer,
)
from tests.support.router.streams import marked

HUGE = 10**400
LONG = b"1" * 5000


def running(harness: Harness) -> list[int]:
    return [tenant.running for tenant in harness.router.gate.tenants.all]


@pytest.mark.parametrize(
    "lie",
    [
        {"prompt_tokens": HUGE},
        {"prompt_tokens": -1_000_000},
        {"missing_pages": -3},
        {"cached": {"device": HUGE}},
        {"cached_by_prompt": [[HUGE, 0, 0]]},
        {"turns": "1\r\nx-pdserve-cache-salt: a"},
        {"turns": "1\n"},
        {"turns": "1" * 2000},
        {"turns": 1},
    ],
)
async def test_a_report_of_impossible_numbers_is_none(lie: dict[str, Any]) -> None:
    async with disagg() as (harness, [prefill], _):
        prefill.script("/pd/prefill", answer(200, REPORT | lie))
        assert (await harness.chat()).body == ANSWER
        assert dict(harness.stats.prefill) == {"garbage": 1}
        assert exposition(harness.router.own_metrics())


@pytest.mark.parametrize("policy", ["cache_aware", "load_aware", "affinity"])
@pytest.mark.parametrize("huge", [HUGE, -HUGE])
async def test_an_impossible_load_hurts_no_request(policy: str, huge: int) -> None:
    def make(role: str) -> MockWorker:
        worker = MockWorker(role)
        worker.load = {"running_requests": abs(huge), "queued_tokens": abs(huge), "free_kv_tokens": huge}
        return worker

    policies = {"decode_policy": policy, "prefill_policy": policy}
    async with disagg(make=make, **policies) as (harness, _, _):
        assert (await harness.chat(user="u")).status == 200


@pytest.mark.parametrize("count", [LONG, b"[1, %b, 2]" % LONG, b"[1 2]"])
async def test_a_count_of_thousands_of_digits_keeps_no_slot_and_is_charged_as_none(count: bytes) -> None:
    async with disagg() as (harness, _, [decode]):
        decode.script("/tokenize", answer(200, b'{"count": %b}' % count))
        assert (await harness.post("/tokenize", {"prompt": "x" * 4})).status == 200
        await harness.settle()
        assert running(harness) == [0]
        assert harness.router.gate.tenants.anonymous.use.prompt_tokens in (1, 3)


async def test_a_fault_in_charging_keeps_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(meter: Meter, streamed: bool) -> tuple[int, int]:
        raise ArithmeticError

    async with disagg() as (harness, _, _):
        monkeypatch.setattr(Meter, "total", fails)
        assert (await harness.post("/tokenize", {"prompt": "x"})).status == 200
        await harness.settle()
        assert running(harness) == [0]


async def test_a_status_that_does_not_exist_is_no_answer() -> None:
    async with disagg(decode=2) as (harness, _, decodes):
        for decode in decodes:
            decode.script(CHAT, answer(700, b"{}"))
        response = await harness.chat()
        assert (response.status, response.error["code"]) == (502, "worker_unavailable")


@pytest.mark.parametrize(
    "mark", [b"1 0 99999999999999999999999", b"1 0 -7", b"1 -1 7", b"1 3 7", b"-1 0 7", b"1 0 " + LONG]
)
async def test_a_mark_of_impossible_tokens_ends_the_marks_and_not_the_stream(mark: bytes) -> None:
    marks = StreamMarks()
    marks.begin(is_marked=True)
    assert marks.take(EVENTS[0] + b": pd %b\n\n" % mark + EVENTS[1]) == EVENTS[0] + EVENTS[1]
    assert (marks.is_marked, marks.token_count) == (False, 0)


async def test_usage_beyond_what_a_model_can_take_and_give_locks_no_tenant_out() -> None:
    usage = {"prompt_tokens": 10**15 - 1, "completion_tokens": 10**15 - 1}
    async with disagg() as (harness, [prefill], [decode]):
        prefill.script("/pd/prefill", answer(500, {}))
        decode.script(CHAT, answer(200, {"usage": usage}))
        await harness.post(CHAT, chat_body(n=2))
        await harness.settle()
        use = harness.router.gate.tenants.anonymous.use
        context = decode.info["context_length"]
        assert (use.prompt_tokens, use.output_tokens) == (context, 2 * context)


async def test_events_of_a_stream_are_charged_where_its_marks_are_impossible() -> None:
    async with disagg(prefill=0) as (harness, _, [decode]):
        decode.script(CHAT, marked(EVENTS[0] + b": pd 1 9 7\n\n" + EVENTS[1] + DONE))
        assert (await harness.chat(stream=True)).body == EVENTS[0] + EVENTS[1] + DONE
        await harness.settle()
        assert harness.router.gate.tenants.anonymous.use.output_tokens == 3
