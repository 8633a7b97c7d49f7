"""Requests that cannot fit are refused before any worker sees them."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.router.config.limits import Limits
from pdserve.router.fleet.text_limits import SMALLEST_BODY_BYTES
from tests.support.router.harness import CHAT, disagg
from tests.support.router.mock_worker import MockWorker

PATH = "/v1/completions"
FACTS: dict[str, Any] = {"longest_token_bytes": 10, "text_shrink": 1, "is_multimodal": False}
TOO_LONG = "x" * (4096 * 10)


def knowing(role: str) -> MockWorker:
    return MockWorker(role, **FACTS)


@pytest.mark.parametrize("key", [False, True])
async def test_a_text_that_cannot_fit_reaches_no_worker_and_costs_nothing(
    key: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = {}
    if key:
        monkeypatch.setenv("PDSERVE_API_KEYS", f"acme={'k' * 40}")
        headers = {"authorization": f"Bearer {'k' * 40}"}
    async with disagg(make=knowing) as (harness, [prefill], [decode]):
        response = await harness.post(PATH, {"model": "m", "prompt": TOO_LONG}, headers)
        assert (response.status, response.error["code"]) == (400, "context_length_exceeded")
        assert "40,960 bytes are at least 4,096 tokens" in response.error["message"]
        assert (prefill.requests, decode.requests) == ([], [])
        [tenant] = harness.router.gate.tenants.all
        assert tenant.use.requests == 0
        assert (await harness.post(PATH, {"model": "m", "prompt": TOO_LONG[10:]}, headers)).status == 200


async def test_workers_of_an_older_version_are_asked_whatever_the_length() -> None:
    async with disagg() as (harness, _, [decode]):
        assert (await harness.post(PATH, {"model": "m", "prompt": TOO_LONG})).status == 200
        assert len(decode.got(PATH)) == 1


async def test_bodies_are_bounded_by_the_context_length_unless_the_configuration_says_otherwise() -> None:
    content = "x" * SMALLEST_BODY_BYTES
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    async with disagg(make=knowing) as (harness, _, [decode]):
        response = await harness.post(CHAT, body)
        assert (response.status, response.error["code"]) == (413, "body_too_large")
        assert decode.requests == []
    async with disagg(make=knowing, limits=Limits(body_bytes=2 * SMALLEST_BODY_BYTES)) as (harness, _, _):
        assert (await harness.post(CHAT, body)).status == 200
    async with disagg() as (harness, _, _):  # workers that do not say
        assert (await harness.post(CHAT, body)).status == 200
