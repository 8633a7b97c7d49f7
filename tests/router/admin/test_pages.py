"""Tenants' pages in the pool, asked and erased by the admin API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.router.admin.pages import ERASE, TENANTS
from pdserve.router.config.router import Admin
from pdserve.router.config.tenants import Tenant
from pdserve.router.sessions.keys import named
from tests.support.router.harness import CHAT, disagg
from tests.support.router.live_page import KEY, client_of
from tests.support.router.mock_worker import MockWorker, answer
from tests.support.router.tenants import ALICE, BOB, keyed

HELD = {"tenants": {"team": {"n0": [5, 7], "n1": [1, 0]}, "": {"n0": [9, 9]}}, "problems": {"n2": "away"}}


def config(tmp_path: Path) -> dict[str, Any]:
    """Alice's cache has another name than she, and Bob shares his."""
    tenants = (Tenant(name="alice", cache="team"), Tenant(name="bob", cache="shared"))
    return {"admin": Admin(key=KEY), "access": keyed(tmp_path), "tenants": tenants}


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


SESSION = {"x-claude-code-session-id": "s1"}


def tagged(role: str) -> MockWorker:
    return MockWorker(role, info_tag=f"tag-{role}")


def knows(worker: MockWorker, turn: int, problems: dict[str, str] | None = None) -> None:
    worker.script(ERASE, answer(200, {"pages": {"n0": 2}, "problems": problems or {}, "turn": turn}))


async def test_a_session_is_erased_at_all_workers_that_have_computed_for_it() -> None:
    async with (
        disagg(make=tagged, admin=Admin(key=KEY)) as (harness, [prefill], [decode]),
        client_of(harness) as client,
    ):
        for _ in range(2):
            await harness.chat(SESSION)
        named = [one.headers["x-pdserve-session"].split(" ") for one in decode.got(CHAT)]
        assert [turn for _, turn in named] == ["1", "2"]
        assert prefill.got("/pd/prefill")[0].headers["x-pdserve-session"] == " ".join(named[0])
        assert "x-pdserve-session" not in (await harness.chat(), decode.got(CHAT)[-1])[1].headers
        for worker in (prefill, decode):
            knows(worker, 1)
        told = (await client.post("/pages/erase", json={"session": "s1"})).json()
        assert told == {"erased": True, "pages": {"n0": 2}, "problems": {}, "turns": 2}
        assert [w.got(ERASE)[0].json() for w in (prefill, decode)] == [{"session": named[0][0]}] * 2


@pytest.mark.parametrize("lacks", ["turns", "its memory", "a worker", "the router's memory"])
async def test_an_erasure_of_a_session_that_is_known_in_part_says_so(lacks: str) -> None:
    async with (
        disagg(make=tagged, admin=Admin(key=KEY)) as (harness, [prefill], [decode]),
        client_of(harness) as client,
    ):
        await harness.chat(SESSION)
        sessions = harness.router.proxy.placer.sessions
        if lacks == "a worker":
            harness.router.fleet.members.leave(prefill.id)
        if lacks == "the router's memory":
            sessions.forget(named("s1").of_model("m"))
        for worker in (prefill, decode):
            knows(worker, {"turns": 2, "its memory": 0}.get(lacks, 1))
        told = (await client.post("/pages/erase", json={"session": "s1"})).json()
        assert (told["erased"], list(told["problems"])) == (False, ["session"])
        assert told["pages"] == {"n0": 2}
        for worker in (prefill, decode):
            knows(worker, 0)
        assert (await client.post("/pages/erase", json={"session": "s2"})).status_code == 404


async def test_sessions_of_one_name_are_apart_for_each_tenant(tmp_path: Path) -> None:
    async with disagg(**config(tmp_path)) as (harness, [prefill], [decode]), client_of(harness) as client:
        for key in (ALICE, BOB):
            await harness.chat({**SESSION, "authorization": f"Bearer {key}"})
        digests = [one.headers["x-pdserve-session"].split(" ")[0] for one in decode.got(CHAT)]
        for worker in (prefill, decode):
            knows(worker, 1)
        await client.post("/pages/erase", json={"tenant": "bob", "session": "s1"})
        assert decode.got(ERASE)[-1].json() == {"session": digests[1]} != {"session": digests[0]}
        assert (await client.post("/pages/erase", json={"session": "s1"})).status_code == 400


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
