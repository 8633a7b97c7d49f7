"""What one worker answers: stored responses, sessions, and what SGLang says of itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from pdserve.router.app.routes import MAX_AT_ONCE
from pdserve.router.config.limits import Limits
from pdserve.router.config.tenants import Tenant
from tests.support.router.harness import Harness, disagg
from tests.support.router.mock_worker import Gate, MockWorker, answer, hang
from tests.support.router.tenants import ALICE, BOB, by

RESPONSES, GENERATE = "/v1/responses", "/generate"
INFO = "/get_model_info"


@pytest.fixture(autouse=True)
def admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_ADMIN_KEY", "admin-" + "x" * 20)


@asynccontextmanager
async def two_tenants(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Harness, list[MockWorker]]]:
    monkeypatch.setenv("PDSERVE_API_KEYS", f"alice={ALICE},bob={BOB}")
    alice = msgspec.structs.replace(Tenant(name="alice"), controls_engine=True)
    async with disagg(decode=4, tenants=(alice,)) as (harness, _, decodes):
        yield harness, decodes


def stored(decodes: list[MockWorker]) -> tuple[str, MockWorker]:
    """The id of the only response that was asked for, and its worker."""
    ((id_, worker),) = [(got.json()["request_id"], one) for one in decodes for got in one.got(RESPONSES)]
    return id_, worker


async def ask(harness: Harness, headers: dict[str, str] | None = None, **more: Any) -> int:
    body = {"model": "m", "input": "word " * 50} | more
    return (await harness.post(RESPONSES, body, headers)).status


async def test_a_stored_response_is_read_continued_and_cancelled_where_it_is_and_nowhere_else() -> None:
    async with disagg(decode=4) as (harness, _, decodes):
        assert await ask(harness, request_id="resp_of_the_client") == 200
        id_, worker = stored(decodes)
        said = {"id": id_, "status": "completed"}
        for path in (f"{RESPONSES}/{id_}", f"{RESPONSES}/{id_}/cancel"):
            worker.script(path, answer(200, said))
        assert (await harness.get(f"{RESPONSES}/{id_}")).json() == said
        assert (await harness.post(f"{RESPONSES}/{id_}/cancel", {})).json() == said
        for _ in range(6):
            assert await ask(harness, previous_response_id=id_) == 200
        worker.script(RESPONSES, answer(500, {"error": "boom"}))
        assert await ask(harness, previous_response_id=id_) == 500
        assert len(worker.got(RESPONSES)) == 8
        assert all(one is worker or not one.got(RESPONSES) for one in decodes)


async def test_a_retried_response_has_the_id_of_the_worker_that_answered() -> None:
    async with disagg(decode=2) as (harness, _, (failing, working)):
        for _ in range(4):
            failing.script(RESPONSES, answer(503, {"error": "full"}))
            assert await ask(harness) == 200
        assert failing.got(RESPONSES)
        for got in working.got(RESPONSES):
            id_ = got.json()["request_id"]
            working.script(f"{RESPONSES}/{id_}", answer(200, {"id": id_}))
            assert (await harness.get(f"{RESPONSES}/{id_}")).json() == {"id": id_}


async def test_tenants_neither_read_nor_continue_each_others_responses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with two_tenants(monkeypatch) as (harness, decodes):
        assert await ask(harness, by(ALICE)) == 200
        id_, worker = stored(decodes)
        asked = len(worker.requests)
        assert (await harness.get(f"{RESPONSES}/{id_}", by(BOB))).status == 404
        assert (await harness.post(f"{RESPONSES}/{id_}/cancel", {}, by(BOB))).status == 404
        assert await ask(harness, by(BOB), previous_response_id=id_) == 404
        assert await ask(harness, by(BOB), background=True) == 400
        assert (await harness.get(f"{RESPONSES}/{id_}")).status == 401
        assert len(worker.requests) == asked


async def test_what_sglang_says_of_itself_comes_from_a_worker_which_is_waited_for_no_longer_than_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with disagg() as (harness, _, (decode,)):
        decode.script(INFO, answer(200, {"model_path": "/m"}), answer(500, {"detail": "boom"}), hang())
        assert (await harness.get(INFO)).json() == {"model_path": "/m"}
        failed = await harness.get(INFO)
        assert (failed.status, failed.error["message"]) == (500, "boom")
        assert (await harness.get(INFO + "?model=nope")).status == 404
        monkeypatch.setattr("pdserve.router.app.routes.LIMIT_S", 0.05)
        assert (await harness.get(INFO)).status == 504


async def test_it_counts_as_a_request_of_the_tenant_and_what_shows_the_whole_server_is_for_administrators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PDSERVE_API_KEYS", f"alice={ALICE}")
    async with disagg(tenants=(Tenant(name="alice", requests_s=0.01),)) as (harness, _, (decode,)):
        decode.script(INFO, answer(200, {"model_path": "/m"}))
        assert (await harness.get(INFO, by(ALICE))).status == 200
        refused = await harness.get(INFO, by(ALICE))
        assert (refused.status, len(decode.got(INFO))) == (429, 1)
        assert int(refused.headers["retry-after"]) > 1
        for path in ("/server_info", "/get_server_info"):
            assert (await harness.get(path, by(ALICE))).status == 401
            decode.script(path, answer(200, {"tp_size": 1}))
            assert (await harness.get(path, by("admin-" + "x" * 20))).json() == {"tp_size": 1}


async def test_one_tenant_does_not_take_all_connections_to_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PDSERVE_API_KEYS", f"alice={ALICE},bob={BOB}")
    limits = Limits(worker_connections=MAX_AT_ONCE + 2)
    async with disagg(prefill=0, limits=limits) as (harness, _, (decode,)):
        gate = Gate()
        decode.script(INFO, *[hang(gate)] * MAX_AT_ONCE)
        clients = [await harness.connect() for _ in range(MAX_AT_ONCE)]
        for client in clients:
            await client.send(INFO, b"", by(ALICE), method="GET")
        await decode.wait_until(lambda: len(decode.got(INFO)) == MAX_AT_ONCE)
        for _ in range(4):
            refused = await harness.get(INFO, by(ALICE))
            assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
            assert int(refused.headers["retry-after"]) >= 1
        decode.script(INFO, answer(200, {"model_path": "/m"}))
        assert (await harness.get(INFO, by(BOB))).status == 200
        assert (await harness.chat(by(BOB))).status == 200
        gate.open.set()
        assert {(await client.response()).status for client in clients} == {502}
        decode.script(INFO, answer(200, {"model_path": "/m"}))
        assert (await harness.get(INFO, by(ALICE))).status == 200
