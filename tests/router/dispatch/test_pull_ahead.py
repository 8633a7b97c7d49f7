"""A long prompt's decode worker is asked to pull while prefill computes, and nothing depends on it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.router.harness import disagg
from tests.support.router.mock_worker import ANSWER, REPORT, Gate, hang, stream

CHAT = "/v1/chat/completions"
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


@pytest.mark.parametrize("settings", [{}, {"pull_ahead_tokens": 0}, {"pull_ahead_tokens": 2000}])
async def test_shorter_prompts_are_not_pulled_ahead(settings: dict[str, int]) -> None:
    async with disagg(**settings) as (harness, _, [decode]):
        await harness.chat(**LONG)
        assert [request.path for request in decode.requests] == [CHAT]
