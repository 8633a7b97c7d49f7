"""Look-ups of prompts through the router: whose pages they are about, and what tenants may not ask."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.router.tenants.rights import SALT_HEADER
from tests.support.router.harness import disagg
from tests.support.router.mock_worker import MockWorker, answer

LOOKUP = "/v1/kv/lookup"
ALICE = "alice-" + "a" * 20
FOUND = {
    "page_tokens": 64,
    "prompt_tokens": 9,
    "prompt_pages": 0,
    "tokens": 0,
    "memory_tokens": 0,
    "tiers": {},
}
BODY: dict[str, Any] = {"model": "m", "prompt": "hello"}


async def test_a_worker_answers_and_gets_the_body_as_it_came() -> None:
    async with disagg() as (harness, [prefill], [decode]):
        decode.script(LOOKUP, answer(200, FOUND))
        body = {**BODY, "nodes": True}
        assert (await harness.post(LOOKUP, body)).json() == FOUND
        [got] = decode.got(LOOKUP)
        assert got.json() == body
        assert SALT_HEADER.decode() not in got.headers
        assert not prefill.got(LOOKUP)


async def test_a_tenant_asks_with_its_own_salt_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_API_KEYS", f"alice={ALICE}")
    monkeypatch.setenv("PDSERVE_ADMIN_KEY", "admin-" + "x" * 20)
    by_alice = {"authorization": f"Bearer {ALICE}"}
    async with disagg(make=lambda role: MockWorker(role, takes_salt_header=True)) as (harness, _, [decode]):
        assert (await harness.post(LOOKUP, BODY)).status == 401
        decode.script(LOOKUP, answer(200, FOUND), answer(200, FOUND))
        assert (await harness.post(LOOKUP, BODY, by_alice)).status == 200
        mine = {**BODY, "cache_salt": "tenant/bob"}
        assert (await harness.post(LOOKUP, mine, by_alice)).status == 200
        salts = [json.loads(got.headers[SALT_HEADER.decode()]) for got in decode.got(LOOKUP)]
        assert salts == ["tenant/alice", "tenant/alice/tenant/bob"]
        for field, value in (("hashes", ["00" * 32]), ("nodes", True), ("extra_key", "x")):
            refused = await harness.post(LOOKUP, {**BODY, field: value}, by_alice)
            assert (refused.status, refused.error["param"]) == (400, field)
        assert len(decode.got(LOOKUP)) == 2


async def test_a_body_without_bound_is_refused() -> None:
    async with disagg() as (harness, _, [decode]):
        assert (await harness.post(LOOKUP, {**BODY, "prompt": "x" * (40 << 20)})).status == 413
        assert not decode.got(LOOKUP)
