"""Conversations that tenants have kept: bounds, and what reaches the worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.kvpool.protocol.messages import MAX_KEEP_S
from pdserve.router.config.tenants import Access, Tenant, TenantLimits
from pdserve.router.tenants.api_keys import key_line
from pdserve.router.tenants.retained import Retained, seconds_of
from pdserve.router.tenants.tenant import TenantState
from tests.support.router.harness import CHAT, Response, before
from tests.support.router.mock_worker import MockWorker, answer

ALICE, BOB = "alice-" + "a" * 20, "bob-" + "b" * 20
HINTS, KEEP = "/v1/kv/hints", "/pd/keep"


def test_a_tenant_has_no_more_tokens_kept_than_it_may() -> None:
    tenant, kept = TenantState("t", TenantLimits(retain_tokens=100), 0.0), Retained()
    assert kept.take(tenant, "a", 60, 10, 0.0)
    assert not kept.take(tenant, "b", 60, 10, 0.0)
    assert kept.take(tenant, "a", 70, 10, 1.0)  # its next turn takes the place of the one before
    assert kept.take(tenant, "b", 30, 10, 1.0)
    assert kept.tokens(tenant, 1.0) == 100
    kept.release(tenant, "a")
    assert kept.take(tenant, "c", 70, 10, 1.0)
    assert kept.tokens(tenant, 11.0) == 0
    assert kept.take(tenant, "d", 100, 10, 11.0)


def test_conversations_of_no_length_are_bounded_too() -> None:
    tenant, kept = TenantState("t", TenantLimits(retain_tokens=1), 0.0), Retained()
    assert sum(kept.take(tenant, str(i), 0, 10, 0.0) for i in range(2000)) == 1000


def test_who_may_keep_nothing_keeps_nothing() -> None:
    assert not Retained().take(TenantState("t", TenantLimits(), 0.0), "a", 0, 10, 0.0)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        (b"5", 5),
        (b"999999999", MAX_KEEP_S),
        (b"0", 0),
        (b"", 0),
        (b"-1", 0),
        (b"1e9", 0),
        (b"9" * 99, 0),
        (b"nan", 0),
    ],
)
def test_what_is_no_number_is_no_wish(said: bytes, seconds: int) -> None:
    assert seconds_of(said) == seconds


# --- through a router


@pytest.fixture
def site(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "keys").write_text(key_line("alice", ALICE) + key_line("bob", BOB))
    tenants = (Tenant(name="alice", retain_tokens=100),)
    return {"access": Access(keys_file=tmp_path / "keys"), "tenants": tenants}


def by(key: str, **more: str) -> dict[str, str]:
    named = {name.replace("_", "-"): said for name, said in more.items()}
    return {"authorization": f"Bearer {key}", "x-session-id": "s"} | named


def retained(response: Response) -> str | None:
    assert response.status == 200
    return response.headers.get("x-pdserve-retained")


async def test_a_wish_reaches_the_worker_within_the_tenants_bound(site: dict[str, Any]) -> None:
    worker = MockWorker("decode")
    async with before(worker, **site) as harness:
        long = [{"role": "user", "content": "word " * 200}]
        assert retained(await harness.chat(by(ALICE, x_pdserve_retain="300"))) == "300"
        assert retained(await harness.chat(by(ALICE, x_pdserve_retain="300"), messages=long)) == "0"
        assert retained(await harness.chat(by(ALICE, x_pdserve_retain="soon"))) == "0"
        assert retained(await harness.chat(by(BOB, x_pdserve_retain="300"))) == "0"
        assert retained(await harness.chat(by(ALICE))) is None
        assert [request.headers.get("x-pdserve-keep") for request in worker.got(CHAT)] == ["300", *[None] * 4]


async def test_a_sessions_end_frees_what_was_kept_at_its_worker(site: dict[str, Any]) -> None:
    worker = MockWorker("decode")
    worker.script(KEEP, *[answer(200, {"known": True, "parts": 4})] * 3)
    async with before(worker, **site) as harness:
        assert retained(await harness.chat(by(ALICE, x_pdserve_retain="300", x_request_id="mine"))) == "300"
        renewed = await harness.post(HINTS, {"ttl_s": 600}, by(ALICE))
        released = await harness.post(HINTS, {"ttl_s": 0}, by(ALICE))
        assert renewed.json() == released.json() == {"known": True, "parts": 4}
        assert [request.json() for request in worker.got(KEEP)] == [
            {"request_id": "alice:mine", "keep_s": 600},
            {"request_id": "alice:mine", "keep_s": 0},
        ]
        tenants = harness.router.gate.tenants.all
        assert harness.router.generation.retained.tokens(tenants[0], 0.0) == 0


async def test_nobody_reaches_a_session_of_another_tenant(site: dict[str, Any]) -> None:
    worker = MockWorker("decode")
    async with before(worker, **site) as harness:
        await harness.chat(by(ALICE, x_pdserve_retain="300"))
        said = await harness.post(HINTS, {"ttl_s": 0}, by(BOB))
        assert said.json() == {"known": False, "parts": 0}
        assert worker.got(KEEP) == []


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        ({"ttl_s": -1}, by(ALICE), 400),
        ({"ttl_s": 10**9}, by(ALICE), 400),
        ({"ttl_s": 10**40}, by(ALICE), 400),
        ({"ttl_s": "nan"}, by(ALICE), 400),
        ({}, by(ALICE), 400),
        (b"\xff", by(ALICE), 400),
        (b"x" * 70_000, by(ALICE), 413),
        ({"ttl_s": 0}, {"authorization": f"Bearer {ALICE}"}, 404),
        ({"ttl_s": 0, "model": "nobody"}, by(ALICE), 200),
        ({"ttl_s": 0}, {"x-session-id": "s"}, 401),
    ],
)
async def test_a_hint_that_is_none_is_refused(
    site: dict[str, Any], body: Any, headers: dict[str, str], status: int
) -> None:
    async with before(MockWorker("decode"), **site) as harness:
        assert (await harness.post(HINTS, body, headers)).status == status


async def test_a_worker_that_does_not_know_the_route_is_an_error_of_the_hint_alone(
    site: dict[str, Any],
) -> None:
    worker = MockWorker("decode")
    worker.script(KEEP, answer(404, {"detail": "Not Found"}))
    async with before(worker, **site) as harness:
        await harness.chat(by(ALICE))
        assert (await harness.post(HINTS, {"ttl_s": 0}, by(ALICE))).status == 404
        assert (await harness.chat(by(ALICE))).status == 200
