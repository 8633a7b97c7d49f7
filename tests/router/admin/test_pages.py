"""Tenants' pages in the pool, asked and erased by the admin API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.router.admin.app import AdminApp
from pdserve.router.admin.pages import ERASE, TENANTS
from pdserve.router.config.router import Admin
from pdserve.router.config.tenants import Access, Tenant
from pdserve.router.tenants.api_keys import key_line
from tests.support.router.harness import Harness, disagg
from tests.support.router.mock_worker import answer
from tests.support.router.tenants import ALICE, BOB

KEY = "administrators-key-of-this-test"
HELD = {"tenants": {"team": {"n0": [5, 7], "n1": [1, 0]}, "": {"n0": [9, 9]}}, "problems": {"n2": "away"}}


def client_of(harness: Harness) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(AdminApp(harness.router))  # type: ignore[arg-type]
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.AsyncClient(transport=transport, base_url="http://admin", headers=headers)


def config(tmp_path: Path) -> dict[str, Any]:
    """Alice's cache has another name than she, and Bob shares his."""
    keys = tmp_path / "keys"
    keys.write_text(key_line("alice", ALICE) + key_line("bob", BOB))
    tenants = (Tenant(name="alice", cache="team"), Tenant(name="bob", cache="shared"))
    return {"admin": Admin(key=KEY), "access": Access(keys_file=keys), "tenants": tenants}


async def test_the_bytes_of_a_tenants_cache_are_summed_over_nodes(tmp_path: Path) -> None:
    async with disagg(**config(tmp_path)) as (harness, [prefill], [decode]), client_of(harness) as client:
        for worker in (prefill, decode):
            worker.script(TENANTS, answer(200, HELD))
        told = {one["name"]: one["pool"] for one in (await client.get("/tenants")).json()["tenants"]}
        assert told == {"alice": {"memory_bytes": 6, "tier_bytes": 7}, "bob": None}
        assert len(prefill.got(TENANTS) + decode.got(TENANTS)) == 2  # each may know other nodes


async def test_all_workers_erase_a_tenants_pages_and_each_problem_is_told(tmp_path: Path) -> None:
    async with disagg(**config(tmp_path)) as (harness, [prefill], [decode]), client_of(harness) as client:
        prefill.script(ERASE, answer(200, {"pages": {"n0": 3, "n1": 0}, "problems": {}}))
        decode.script(ERASE, answer(200, {"pages": {"n0": 0}, "problems": {"n1": "not_erased"}}))
        told = (await client.post("/pages/erase", json={"tenant": "alice"})).json()
        problems = {f"{decode.id} n1": "not_erased"}
        assert told == {"erased": False, "pages": {"n0": 3, "n1": 0}, "problems": problems}
        assert [w.got(ERASE)[0].json() for w in (prefill, decode)] == [{"tenant": "team"}] * 2
        prefill.script(ERASE, answer(200, {"pages": {"n0": 1}, "problems": {}}))
        decode.script(ERASE, answer(403, {"error": {"message": "this host only"}}))
        told = (await client.post("/pages/erase", json={"tenant": "alice"})).json()
        assert told["pages"] == {"n0": 1}
        assert "this host only" in told["problems"][f"{decode.id} worker"]


async def test_a_prompt_is_erased_under_the_salt_of_its_tenant(tmp_path: Path) -> None:
    async with disagg(**config(tmp_path)) as (harness, [prefill], [decode]), client_of(harness) as client:
        body = {"messages": [{"role": "user", "content": "hello"}]}
        for tenant, salt in (("alice", '"tenant/team"'), ("bob", None)):
            for worker in (prefill, decode):
                worker.script(ERASE, answer(200, {"pages": {"n0": 2}, "problems": {}}))
            asked = {"tenant": tenant, "model": "m", "request": body}
            told = (await client.post("/pages/erase", json=asked)).json()
            assert told == {"erased": True, "pages": {"n0": 2}, "problems": {}}
            got = decode.got(ERASE)[-1]
            assert (got.json(), got.headers.get("x-pdserve-cache-salt")) == (body, salt)


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ({}, 400),
        ({"tenant": 5}, 400),
        ({"tenant": "bob"}, 409),
        ({"tenant": "alice", "model": "other"}, 404),
    ],
)
async def test_an_erasure_that_names_nothing_of_its_own_is_refused(
    tmp_path: Path, asked: dict[str, Any], status: int
) -> None:
    async with disagg(**config(tmp_path)) as (harness, [prefill], _), client_of(harness) as client:
        assert (await client.post("/pages/erase", json=asked)).status_code == status
        assert prefill.got(ERASE) == []
