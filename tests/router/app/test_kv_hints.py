"""Hints about prompts through the router: who may give them, how many, and which worker gets them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.router.config.tenants import Access, Tenant, TenantLimits
from pdserve.router.tenants.api_keys import key_line
from pdserve.router.tenants.rights import SALT_HEADER
from tests.support.router.harness import before, disagg
from tests.support.router.mock_worker import MockWorker, answer

PREFETCH, DEMOTE = "/v1/kv/prefetch", "/v1/kv/demote"
KEYS = {name: f"{name}-" + "k" * 20 for name in ("alice", "bob", "sharing")}
SHORT = [{"role": "user", "content": "word " * 25}]
LONG = [{"role": "user", "content": "word " * 2000}]
DONE = {"prompt_tokens": 9, "tokens": 8, "prefetched_tokens": 8}


@pytest.fixture
def site(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "keys").write_text("".join(key_line(name, key) for name, key in KEYS.items()))
    tenants = (
        Tenant(name="alice", retain_tokens=100),
        Tenant(name="sharing", retain_tokens=100, cache="shared"),
    )
    return {"access": Access(keys_file=tmp_path / "keys"), "tenants": tenants}


def by(name: str, session: str = "s") -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}", "x-session-id": session}


def scripted() -> MockWorker:
    worker = MockWorker("decode", takes_salt_header=True)
    for path in (PREFETCH, DEMOTE):
        worker.script(path, *[answer(200, DONE)] * 8)
    return worker


async def test_a_hint_reaches_the_worker_with_the_tenants_salt(site: dict[str, Any]) -> None:
    worker = scripted()
    async with before(worker, **site) as harness:
        for path in (PREFETCH, DEMOTE):
            said = await harness.post(path, {"messages": SHORT}, by("alice"))
            assert (said.status, said.json()) == (200, DONE)
            [got] = worker.got(path)
            assert got.headers[SALT_HEADER.decode()] == '"tenant/alice"'
            assert got.json() == {"messages": SHORT}


async def test_who_may_keep_nothing_may_give_no_hints(site: dict[str, Any]) -> None:
    worker = scripted()
    async with before(worker, **site) as harness:
        for path in (PREFETCH, DEMOTE):
            assert (await harness.post(path, {"messages": SHORT}, by("bob"))).status == 403
            assert (await harness.post(path, {"messages": SHORT})).status == 401
            assert worker.got(path) == []


async def test_pages_that_tenants_share_are_demoted_by_none_of_them(site: dict[str, Any]) -> None:
    worker = scripted()
    async with before(worker, **site) as harness:
        assert (await harness.post(PREFETCH, {"messages": SHORT}, by("sharing"))).status == 200
        refused = await harness.post(DEMOTE, {"messages": SHORT}, by("sharing"))
        assert (refused.status, refused.error["type"]) == (403, "permission_error")
        assert worker.got(DEMOTE) == []


async def test_a_tenant_has_no_more_brought_up_than_it_may_have_kept(site: dict[str, Any]) -> None:
    worker = scripted()
    async with before(worker, **site) as harness:
        assert (await harness.post(PREFETCH, {"messages": LONG}, by("alice"))).status == 429
        for session, status in (("a", 200), ("a", 200), ("b", 200), ("c", 429)):
            said = await harness.post(PREFETCH, {"messages": SHORT}, by("alice", session))
            assert said.status == status, session
        assert len(worker.got(PREFETCH)) == 3


async def test_the_worker_of_the_session_brings_it_up() -> None:
    limits = TenantLimits(retain_tokens=1000)
    async with disagg(decode=4, tenant_defaults=limits) as (harness, _, decodes):
        for decode in decodes:
            decode.script(PREFETCH, answer(200, DONE))
        for number in range(3):
            session = {"x-session-id": f"s{number}"}
            answered = (await harness.chat(session)).headers["x-pdserve-decode"]
            said = await harness.post(PREFETCH, {"messages": SHORT}, session)
            assert said.headers["x-pdserve-decode"] == answered
