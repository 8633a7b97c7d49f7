"""New weights for all workers of a model, which get no requests meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from pdserve.router.admin.app import AdminApp
from pdserve.router.config.limits import Probe
from pdserve.router.config.router import Admin
from tests.support.router.harness import Harness, disagg
from tests.support.router.mock_worker import MockWorker, Received, Wire, answer

KEY = "administrators-key-of-this-test"
UPDATE = "/update_weights_from_disk"
UPDATED = {"success": True, "message": "done"}
BODY = {"model_path": "/new", "weight_version": "7", "abort_all_requests": True}


@asynccontextmanager
async def admin(
    model: str = "m",
) -> AsyncIterator[tuple[Harness, MockWorker, MockWorker, httpx.AsyncClient]]:
    def make(role: str) -> MockWorker:
        return MockWorker(role, model)

    often = Probe(interval_s=0.02, timeout_s=0.5)
    async with disagg(make=make, admin=Admin(key=KEY), probe=often) as (harness, [prefill], [decode]):
        app = AdminApp(harness.router)
        transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://admin", headers=headers) as client:
            yield harness, prefill, decode, client


async def test_all_workers_get_the_body_while_they_are_drained() -> None:
    async with admin() as (harness, prefill, decode, client):
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


async def test_a_worker_that_refuses_is_named_and_used_again() -> None:
    async with admin() as (harness, prefill, decode, client):
        prefill.script(UPDATE, answer(200, UPDATED))
        decode.script(UPDATE, answer(403, {"error": {"message": "weights_fixed"}}))
        done = await client.post(f"/models/m{UPDATE}", json=BODY)
        assert done.status_code == 502
        assert f"{decode.id}: status 403: weights_fixed" in done.json()["error"]["message"]
        assert not any(one.drained for one in harness.router.fleet.workers)


@pytest.mark.parametrize(
    ("path", "body", "status"), [("nobody", BODY, 404), ("m", {"path": "/new"}, 400)], ids=["model", "body"]
)
async def test_what_cannot_be_asked_is_refused(path: str, body: Any, status: int) -> None:
    async with admin() as (_, prefill, decode, client):
        assert (await client.post(f"/models/{path}{UPDATE}", json=body)).status_code == status
        assert prefill.got(UPDATE) == decode.got(UPDATE) == []
