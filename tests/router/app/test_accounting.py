"""What is noted of a request that is over."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from tests.support.router.harness import CHAT, Harness, chat_body, disagg
from tests.support.router.mock_worker import DONE, Gate, answer, stream

KEY = "pd-" + "k" * 40
SECRET = "the words of a prompt"


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record) for record in caplog.records if record.name == "pdserve.router.access"]


def counted(harness: Harness, name: str) -> dict[tuple[str, ...], int]:
    histograms = harness.router.own_metrics().histograms[name]
    return {labels: sum(one.counts) for labels, one in histograms.items()}


@pytest.mark.parametrize("is_on", [True, False])
async def test_the_access_log_says_who_asked_what_of_whom_and_what_it_took_where_it_is_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_on: bool
) -> None:
    monkeypatch.setenv("PDSERVE_API_KEYS", f"acme={KEY}")
    caplog.set_level(logging.INFO, "pdserve.router.access")
    async with disagg(access_log=is_on) as (harness, (prefill,), (decode,)):
        headers = {"authorization": f"Bearer {KEY}"}
        body = chat_body(messages=[{"role": "user", "content": SECRET}])
        assert (await harness.post(CHAT, body, headers)).status == 200
        assert (await harness.post(CHAT, body)).status == 401
        await harness.settle()
        if not is_on:
            assert lines(caplog) == []
            return
        await harness.until(lambda: len(lines(caplog)) == 2)
    served, refused = lines(caplog)
    assert (served["route"], served["status"], served["tenant"], served["model"]) == (CHAT, 200, "acme", "m")
    assert (served["prompt_tokens"], served["output_tokens"]) == (3, 2)
    assert (served["x-pdserve-prefill"], served["x-pdserve-decode"]) == (prefill.id, decode.id)
    assert 0 <= served["first_byte_s"] <= served["seconds"]
    assert (refused["status"], refused["tenant"], refused["model"]) == (401, "", "")
    assert SECRET not in str(lines(caplog))
    assert KEY not in str(lines(caplog))


async def test_times_are_counted_by_model_and_errors_are_not() -> None:
    async with disagg() as (harness, _, (decode,)):
        await harness.chat()
        await harness.chat(stream=True)
        decode.script(CHAT, answer(400, {"error": "no"}))
        await harness.chat()
        await harness.until(lambda: harness.in_flight == 0)
        assert counted(harness, "model_request_seconds") == {("m",): 2}
        assert counted(harness, "model_first_token_seconds") == {("m",): 1}
        assert counted(harness, "model_inter_token_seconds") == {("m",): 1}


async def test_a_stream_whose_end_comes_alone_is_charged_what_it_said_before() -> None:
    """Of two prompts one had no event: what the worker said counts, since the stream was whole."""
    said = b'data: {"choices":[{"index":0}],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n'
    async with disagg(prefill=0) as (harness, _, (decode,)):
        end = Gate()
        decode.script("/v1/completions", stream([said + DONE], end, gate_after=1))
        prompts = ["a long prompt " * 9, "another one " * 9]
        body = {"model": "m", "prompt": prompts, "stream": True}
        client = await harness.connect()
        await client.send("/v1/completions", json.dumps(body).encode())
        await client.head()
        assert await client.chunk() == said + DONE
        await end.reached.wait()
        end.open.set()
        assert await client.chunk() == b""
        await harness.settle()
        use = harness.router.gate.tenants.anonymous.use
        assert (use.prompt_tokens, use.output_tokens) == (3, 1)
