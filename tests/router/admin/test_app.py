"""The admin API, asked without a socket."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import ConfigError
from pdserve.router.app.lifespan import open_router
from pdserve.router.config.limits import Probe
from pdserve.router.config.router import Admin, RouterConfig
from pdserve.router.config.tenants import Access
from pdserve.router.tenants.api_keys import key_line
from tests.support.router.harness import disagg
from tests.support.router.live_page import KEY, client_of
from tests.support.router.mock_worker import (
    ANSWER,
    EVENTS,
    STREAM,
    Gate,
    MockWorker,
    Received,
    Wire,
    answer,
    stream,
    workers,
)
from tests.support.router.process import counted
from tests.support.router.tenants import ALICE, BOB

ADMIN = Admin(key=KEY)


ROUTES = [
    ("GET", "/workers"),
    ("POST", "/workers"),
    ("DELETE", "/workers/x:1"),
    ("POST", "/workers/x:1/drain"),
    ("GET", "/tenants"),
    ("POST", "/pages/erase"),
    ("POST", "/reload"),
    ("GET", "/metrics"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
]


async def test_nothing_but_health_is_told_without_the_key_nor_on_the_public_port() -> None:
    async with disagg(admin=ADMIN) as (harness, _, _):
        for key in ("", "wrong-key-wrong-key", KEY + "x"):
            async with client_of(harness, key) as client:
                for method, path in ROUTES:
                    answer = await client.request(method, path)
                    assert answer.status_code == 401, path
                    assert answer.json()["error"]["type"] == "authentication_error"
                assert (await client.get("/health")).status_code == 200
        assert len(harness.router.fleet.workers) == 2
        for path in ("/workers", "/tenants", "/reload"):
            assert (await harness.get(path)).status == 404


async def test_workers_join_drain_and_leave() -> None:
    new = MockWorker("decode")
    often = Probe(interval_s=0.02, timeout_s=0.5)
    async with workers(new), disagg(admin=ADMIN, probe=often) as (harness, _, [old]):  # noqa: SIM117
        async with client_of(harness) as client:
            joined = await client.post("/workers", json={"url": new.url, "role": "decode"})
            assert (joined.status_code, joined.json()) == (201, {"id": new.id})
            listed = {w["id"]: w for w in (await client.get("/workers")).json()["workers"]}
            assert {new.id, old.id} <= set(listed)
            drained = await client.post(f"/workers/{old.id}/drain")
            assert drained.json() == {"id": old.id, "draining": True, "in_flight": 0}
            while not harness.router.fleet.by_id[new.id].ready:
                await harness.get("/health")
            assert (await harness.chat()).headers["x-pdserve-decode"] == new.id
            assert (await client.post(f"/workers/{old.id}/undrain")).json()["draining"] is False
            assert (await client.delete(f"/workers/{new.id}")).json() == {"id": new.id, "in_flight": 0}
            assert (await harness.chat()).headers["x-pdserve-decode"] == old.id


WRONG: list[tuple[str, str, Any, int]] = [
    ("POST", "/workers", {"url": "nonsense", "role": "decode"}, 400),
    ("POST", "/workers", {"url": "http://10.0.0.256:1", "role": "decode"}, 400),
    ("POST", "/workers", {"url": "http://h:1", "role": "boss"}, 400),
    ("POST", "/workers", {"url": "http://h:1"}, 400),
    ("POST", "/workers", {"url": "http://h:1", "role": "decode", "more": 1}, 400),
    ("POST", "/workers", b'{"url": "\xff", "role": "decode"}', 400),
    ("POST", "/workers", {"url": "x" * 70_000, "role": "decode"}, 413),
    ("DELETE", "/workers/h:1", None, 404),
    ("POST", "/workers/h:1/drain", None, 404),
    ("PUT", "/workers", None, 405),
]


async def test_what_cannot_be_done_is_said_in_openais_form() -> None:
    async with disagg(admin=ADMIN) as (harness, _, _), client_of(harness) as client:
        for method, path, body, status in WRONG:
            given: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
            answer = await client.request(method, path, **given)
            assert answer.status_code == status, (method, path, body)
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert len(harness.router.fleet.workers) == 2


async def test_what_a_worker_that_has_left_still_has_is_told_until_it_is_over() -> None:
    async with disagg(admin=ADMIN) as (harness, _, [decode]), client_of(harness) as client:

        async def in_flight() -> float:
            return counted((await client.get("/metrics")).text, "pdserve_router_worker_requests_in_flight")

        gate = Gate()
        decode.script("/v1/chat/completions", stream(EVENTS, gate, gate_after=1))
        asking = asyncio.create_task(harness.chat(stream=True))
        await gate.reached.wait()
        assert (await client.delete(f"/workers/{decode.id}")).json()["in_flight"] == 1
        assert await in_flight() == 1
        await client.post("/workers", json={"url": decode.url, "role": "decode"})
        listed = {w["id"]: w for w in (await client.get("/workers")).json()["workers"]}
        assert listed[decode.id]["in_flight"] == 1
        gate.open.set()
        assert (await asking).body == STREAM
        await harness.settle()
        assert await in_flight() == 0


async def test_tenants_and_their_use_are_told_and_no_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(key_line("alice", ALICE))
    access = Access(keys_file=keys)
    async with disagg(admin=ADMIN, access=access) as (harness, _, _), client_of(harness) as client:
        assert (await harness.chat({"authorization": f"Bearer {ALICE}"})).body == ANSWER
        told = await client.get("/tenants")
        [alice] = told.json()["tenants"]
        assert alice["name"] == alice["cache"] == "alice"
        assert alice["use"] == {"requests": 1, "refused": 0, "prompt_tokens": 3, "output_tokens": 2}
        assert alice["running"] == alice["waiting"] == 0
        assert "sha256" not in told.text
        assert 'tenant="alice"' in (await client.get("/metrics")).text


async def test_keys_are_read_anew_and_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(key_line("alice", ALICE))
    access = Access(keys_file=keys)
    async with disagg(admin=ADMIN, access=access) as (harness, _, _), client_of(harness) as client:
        alice, bob = ({"authorization": f"Bearer {key}"} for key in (ALICE, BOB))
        assert (await harness.chat(bob)).status == 401
        keys.write_text("nonsense")
        refused = await client.post("/reload")
        assert refused.status_code == 409
        assert "Nothing was changed" in refused.json()["error"]["message"]
        assert (await harness.chat(alice)).status == 200
        keys.write_text(key_line("bob", BOB))
        assert (await client.post("/reload")).json() == {"tenants": ["bob"]}
        assert (await harness.chat(bob)).status == 200
        assert (await harness.chat(alice)).status == 401


async def test_an_admin_port_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDSERVE_ADMIN_KEY", raising=False)
    for key, said in (("", "needs a key"), ("short", "16 characters"), ("with space" * 3, "spaces")):
        with pytest.raises(ConfigError, match=said):
            async with open_router(RouterConfig(decode=("http://h:1",), admin=Admin(port=0, key=key))):
                pass


# --- New weights for all workers of a model, which get no requests meanwhile


UPDATE = "/update_weights_from_disk"
UPDATED = {"success": True, "message": "done"}
BODY = {"model_path": "/new", "weight_version": "7", "abort_all_requests": True}


async def test_all_workers_get_the_body_while_they_are_drained() -> None:
    async with disagg(admin=ADMIN) as (harness, [prefill], [decode]), client_of(harness) as client:
        drained: list[bool] = []

        async def updated(wire: Wire, request: Received) -> None:
            drained.extend(one.drained for one in harness.router.fleet.workers)
            await wire.json(200, UPDATED)

        for worker in (prefill, decode):
            worker.script(UPDATE, updated)
        done = await client.post(f"/models/m{UPDATE}", json={**BODY, "update_timeout_s": 5})
        assert (done.status_code, len(done.json()["updated"])) == (200, 2)
        assert all(drained)
        assert not any(one.drained for one in harness.router.fleet.workers)
        assert [one.json() for one in decode.got(UPDATE)] == [BODY]


async def test_a_worker_that_refuses_is_named_and_used_again_and_what_cannot_be_asked_is_refused() -> None:
    async with disagg(admin=ADMIN) as (harness, [prefill], [decode]), client_of(harness) as client:
        for path, body, status in (("nobody", BODY, 404), ("m", {"path": "/new"}, 400)):
            assert (await client.post(f"/models/{path}{UPDATE}", json=body)).status_code == status
        assert prefill.got(UPDATE) == decode.got(UPDATE) == []
        prefill.script(UPDATE, answer(200, UPDATED))
        decode.script(UPDATE, answer(403, {"error": {"message": "weights_fixed"}}))
        done = await client.post(f"/models/m{UPDATE}", json=BODY)
        assert done.status_code == 502
        assert f"{decode.id}: status 403: weights_fixed" in done.json()["error"]["message"]
        assert not any(one.drained for one in harness.router.fleet.workers)
