"""Anthropic's API through a router: its keys, its errors, its counts, and tenants' caches apart."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdserve.router.config.tenants import Tenant
from tests.support.router.harness import Harness, disagg
from tests.support.router.mock_worker import MockWorker, answer

MESSAGES, COUNT, SCORE = "/v1/messages", "/v1/messages/count_tokens", "/v1/score"
KEY = "pd-" + "k" * 40
ANSWER = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "content": [{"type": "text", "text": "hello"}],
    "model": "m",
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 30, "output_tokens": 7, "cache_read_input_tokens": 70},
}


def body(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "word " * 100}]
    return {"model": "m", "max_tokens": 9, "system": "rule " * 400, "messages": messages} | more


@asynccontextmanager
async def tenants(
    monkeypatch: pytest.MonkeyPatch, *, knows_salts: bool = True
) -> AsyncIterator[tuple[Harness, MockWorker, MockWorker]]:
    """A router with the tenant acme, whose key is `KEY`."""
    monkeypatch.setenv("PDSERVE_API_KEYS", f"acme={KEY}")

    def make(role: str) -> MockWorker:
        return MockWorker(role, takes_salt_header=knows_salts)

    acme = (Tenant(name="acme", tokens_min=1_000_000),)
    async with disagg(make=make, tenants=acme) as (harness, (prefill,), (decode,)):
        yield harness, prefill, decode


async def test_anthropics_key_is_taken_and_both_workers_get_the_salt_in_a_header(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with tenants(monkeypatch) as (harness, prefill, decode):
        decode.script(MESSAGES, answer(200, ANSWER))
        asked = body(cache_salt="mine")
        assert (await harness.post(MESSAGES, asked, {"x-api-key": KEY})).json() == ANSWER
        (staged,), (got,) = prefill.got("/pd/prefill"), decode.got(MESSAGES)
        assert staged.target == f"/pd/prefill?endpoint={MESSAGES}"
        for request in (staged, got):
            assert json.loads(request.headers["x-pdserve-cache-salt"]) == "tenant/acme/mine"
            assert request.json() == asked
            assert "x-api-key" not in request.headers
        use = harness.router.gate.tenants.all[0].use
        assert (use.prompt_tokens, use.output_tokens) == (100, 7)  # what was cached, too


async def test_errors_have_anthropics_form(monkeypatch: pytest.MonkeyPatch) -> None:
    async with tenants(monkeypatch) as (harness, _, decode):
        too_hot = {"type": "error", "error": {"type": "x", "message": "too hot"}}
        decode.script(MESSAGES, answer(400, too_hot))
        for key, asked, status, kind, says in (
            (KEY, body(), 400, "invalid_request_error", "too hot"),
            (KEY, body(model="nope"), 404, "not_found_error", "nope"),
            (KEY, body(cache_salt=["a"]), 400, "invalid_request_error", "cache_salt"),
            (KEY, body(cache_salt=1), 400, "invalid_request_error", "cache_salt"),
            (KEY, body(cache_salt="x" * 9000), 400, "invalid_request_error", "cache_salt"),
            ("", body(), 401, "authentication_error", "key"),
        ):
            response = await harness.post(MESSAGES, asked, {"x-api-key": key} if key else {})
            said = json.loads(response.body)
            assert (response.status, said["type"], said["error"]["type"]) == (status, "error", kind)
            assert says in said["error"]["message"]


async def test_counting_tokens_is_charged_as_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    async with tenants(monkeypatch) as (harness, prefill, decode):
        decode.script(COUNT, answer(200, {"input_tokens": 512}))
        assert (await harness.post(COUNT, body(), {"x-api-key": KEY})).json() == {"input_tokens": 512}
        use = harness.router.gate.tenants.all[0].use
        assert (use.prompt_tokens, use.output_tokens) == (512, 0)
        assert not prefill.requests
