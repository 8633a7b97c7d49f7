"""Conversations that tenants have kept, hints about prompts, and look-ups: what reaches the worker."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdserve.kvpool.protocol.messages import MAX_KEEP_S
from pdserve.router.api.request_body import parse_request
from pdserve.router.config.tenants import Tenant, TenantLimits
from pdserve.router.tenants.retained import keep, release, seconds_marked, seconds_of
from pdserve.router.tenants.rights import SALT_HEADER
from pdserve.router.tenants.tenant import TenantState
from tests.support.router import tenants
from tests.support.router.harness import CHAT, Harness, before, disagg
from tests.support.router.mock_worker import MockWorker, answer
from tests.support.router.tenants import ALICE, BOB, keyed

SHARING = "sharing-" + "s" * 20
HINTS = "/v1/kv/hints"


def test_a_tenant_has_no_more_tokens_and_conversations_kept_than_it_may() -> None:
    tenant = TenantState("t", TenantLimits(retain_tokens=100), 0.0)
    assert keep(tenant, "a", 60, 10, 0.0)
    assert not keep(tenant, "b", 60, 10, 0.0)
    assert keep(tenant, "a", 70, 10, 1.0)  # its next turn takes the place of the one before
    assert keep(tenant, "b", 30, 10, 1.0)
    assert tenant.kept_tokens(1.0) == 100
    release(tenant, "a")
    assert keep(tenant, "c", 70, 10, 1.0)
    assert tenant.kept_tokens(11.0) == 0
    assert keep(tenant, "d", 100, 10, 11.0)
    assert sum(keep(tenant, str(i), 0, 10, 22.0) for i in range(2000)) == 1000


def test_what_is_no_number_is_no_wish() -> None:
    said = [b"5", b"999999999", b"0", b"", b"-1", b"1e9", b"9" * 99, b"nan"]
    assert list(map(seconds_of, said)) == [5, MAX_KEEP_S, *[0] * 6]


FIVE, HOUR = '{"type": "ephemeral"}', '{"ttl": "1h", "type": "ephemeral"}'


@pytest.mark.parametrize(
    ("body", "seconds"),
    [
        (f'{{"system": [{{"cache_control": {FIVE}}}]}}', 300),
        (f'{{"system": [{{"cache_control": {FIVE}}}], "messages": [{{"cache_control":{HOUR}}}]}}', 3600),
        (f'{{"cache_control": {HOUR}}}', 3600),
        ('{"prompt_cache_retention": "24h"}', MAX_KEEP_S),
        ('{"prompt_cache_retention": "in_memory"}', 0),
        ('{"prompt_cache_retention": 5}', 0),
        ('{"system": [{"cache_control": null}]}', 0),
        (json.dumps({"messages": '"cache_control": {"ttl": "1h"}'}), 0),
        ("{}", 0),
    ],
)
def test_marks_for_caches_say_for_how_long(body: str, seconds: int) -> None:
    data = body.encode()
    assert seconds_marked(data, parse_request(data)) == seconds


# --- through a router


async def test_a_wish_or_a_mark_reaches_the_worker_within_the_tenants_bound(site: dict[str, Any]) -> None:
    long = {"messages": [{"role": "user", "content": "word " * 200}]}
    marked = {"prompt_cache_retention": "1h"}
    worker = MockWorker("decode")
    async with before(worker, **site) as harness:
        for key, wish, body, told, kept in (
            (ALICE, "300", {}, "300", "300"),
            (ALICE, "300", long, "0", None),
            (ALICE, "soon", {}, "0", None),
            (ALICE, "", {}, None, None),
            (ALICE, "", marked, "3600", "3600"),
            (ALICE, "60", marked, "60", "60"),
            (BOB, "300", {}, "0", None),
            (BOB, "", marked, None, None),
        ):
            said = await harness.chat(by(key, **({"x_pdserve_retain": wish} if wish else {})), **body)
            assert (said.status, said.headers.get("x-pdserve-retained")) == (200, told), (wish, body)
            assert worker.got(CHAT)[-1].headers.get("x-pdserve-keep") == kept


@pytest.fixture
def site(tmp_path: Path) -> dict[str, Any]:
    tenants = (
        Tenant(name="alice", retain_tokens=100),
        Tenant(name="sharing", retain_tokens=100, cache="shared"),
    )
    return {"access": keyed(tmp_path, sharing=SHARING), "tenants": tenants}


def by(key: str, **more: str) -> dict[str, str]:
    return tenants.by(key, **({"x_session_id": "s"} | more))


# --- Hints about prompts through the router: who may give them, how many, and which worker gets them


SHORT = [{"role": "user", "content": "word " * 25}]
LONG = [{"role": "user", "content": "word " * 2000}]
DONE = {"protocol_version": "1.0", "message_id": "m", "prompt_tokens": 9, "results": []}


def hints(*kinds: str, messages: Any = SHORT, **payload: Any) -> dict[str, Any]:
    actions = [
        {"action_id": kind, "action_type": kind, "action_version": "1.0", "payload": payload}
        for kind in kinds
    ]
    envelope = {"protocol_version": "1.0", "message_id": "m", "actions": actions}
    return {"messages": messages, "kv_hints": envelope}


@asynccontextmanager
async def hinted(site: dict[str, Any]) -> AsyncIterator[tuple[Harness, MockWorker]]:
    worker = MockWorker("decode", takes_salt_header=True)
    worker.script(HINTS, *[answer(200, DONE)] * 8)
    async with before(worker, **site) as harness:
        yield harness, worker


async def test_a_hint_reaches_the_worker_with_the_tenants_salt_if_the_tenant_may_give_it(
    site: dict[str, Any],
) -> None:
    async with hinted(site) as (harness, worker):
        body = hints("prefetch", "demote", "share")
        said = await harness.post(HINTS, body, by(ALICE))
        assert (said.status, said.json()) == (200, DONE)
        [got] = worker.got(HINTS)
        assert (got.headers[SALT_HEADER.decode()], got.json()) == ('"tenant/alice"', body)
        generating = await harness.post(CHAT, hints("prefetch"), by(ALICE))
        assert (generating.status, generating.error["param"]) == (400, "kv_hints")
        for envelope in (None, 5, "x", {"actions": 5}, {"actions": [{}]}):
            refused = await harness.post(HINTS, {"messages": SHORT, "kv_hints": envelope}, by(ALICE))
            assert (refused.status, refused.error["param"]) == (400, "kv_hints")
        assert (await harness.post(HINTS, hints("prefetch"), by(BOB))).status == 403
        assert (await harness.post(HINTS, hints("prefetch"))).status == 401
        assert (await harness.post(HINTS, hints("prefetch"), by(SHARING))).status == 200
        refused = await harness.post(HINTS, hints("kv.demote"), by(SHARING))  # what it shares with others
        assert (refused.status, refused.error["type"]) == (403, "permission_error")
        assert len(worker.requests) == len(worker.got(HINTS)) == 2


@pytest.mark.parametrize("kind", ["prefetch", "retain", "pin"])
async def test_a_tenant_has_no_more_brought_up_or_kept_than_it_may(site: dict[str, Any], kind: str) -> None:
    async with hinted(site) as (harness, worker):
        assert (await harness.post(HINTS, hints(kind, messages=LONG), by(ALICE))).status == 429
        steps = [("a", 60, 200), ("a", 60, 200), ("b", 60, 200), ("c", 60, 429)]
        if kind == "retain":  # what is kept no longer makes room
            steps += [("a", 0, 200), ("c", 60, 200)]
        for session, seconds, status in steps:
            body = hints(kind, ttl_s=seconds)
            assert (await harness.post(HINTS, body, by(ALICE, x_session_id=session))).status == status
        assert len(worker.got(HINTS)) == sum(status == 200 for *_, status in steps)


# --- Look-ups of prompts through the router: whose pages they are about, and what tenants may not ask


LOOKUP = "/v1/kv/lookup"
FOUND = {"page_tokens": 64, "prompt_tokens": 9, "prompt_pages": 0, "tokens": 0, "tiers": {}}
BODY: dict[str, Any] = {"model": "m", "prompt": "hello"}


async def test_a_worker_answers_and_gets_the_body_as_it_came() -> None:
    async with disagg() as (harness, [prefill], [decode]):
        decode.script(LOOKUP, answer(200, FOUND))
        body = {**BODY, "echo": True}
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
        for field, value in (("hashes", ["00" * 32]), ("extra_key", "x")):
            refused = await harness.post(LOOKUP, {**BODY, field: value}, by_alice)
            assert (refused.status, refused.error["param"]) == (400, field)
        assert len(decode.got(LOOKUP)) == 2
