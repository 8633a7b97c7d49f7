"""New weights for all workers of a model: held together, updated, released; or left as they are."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from pdserve.router.admin.app import AdminApp
from pdserve.router.config.limits import Probe
from pdserve.router.config.router import Admin
from tests.support.router.harness import Harness, disagg
from tests.support.router.mock_worker import MockWorker, Received, Script, Wire, answer

KEY = "administrators-key-of-this-test"
HOLD, UPDATE, RELEASE, DROP = (
    "/weights/hold",
    "/update_weights_from_disk",
    "/weights/release",
    "/weights/drop",
)
UPDATED = {"success": True, "message": "done"}
BODY = {"model_path": "/new", "weight_version": "7", "timeout_s": 5}


def says(worker: MockWorker, path: str, status: int, body: Any) -> None:
    worker.script(path, answer(status, body))


def willing(worker: MockWorker, *, earlier: tuple[str, ...] = ("old",)) -> None:
    """The worker does all steps, and has another namespace then."""
    says(worker, HOLD, 200, {"held": True})
    says(worker, UPDATE, 200, UPDATED)

    async def released(wire: Wire, request: Received) -> None:
        worker.info = {**worker.info, "namespace": "new", "kv_geometry": {"model": "new"}}
        await wire.json(200, {"held": False, "earlier_namespaces": list(earlier)})

    worker.script(RELEASE, released)
    says(worker, DROP, 200, {"dropped_pages": 5})


def steps(worker: MockWorker) -> list[str]:
    return [one.path for one in worker.requests]


def bodies(worker: MockWorker, path: str) -> Iterator[Any]:
    return (one.json() for one in worker.requests if one.path == path)


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


async def served(harness: Harness) -> None:
    """Until both workers are used again."""
    while not all(one.ready and not one.refused and not one.draining for one in harness.router.fleet.workers):
        await harness.get("/health")


def model_of(harness: Harness) -> str:
    [model] = harness.router.fleet.models
    return model


async def test_all_are_held_before_one_is_updated_and_released_after_all_are() -> None:
    async with admin() as (harness, prefill, decode, client):
        order: list[str] = []

        def noting(name: str, path: str, script: Script) -> Script:
            async def noted(wire: Wire, request: Received) -> None:
                assert all(one.drained for one in harness.router.fleet.workers)
                order.append(path)
                await script(wire, request)

            return noted

        for worker in (prefill, decode):
            willing(worker)
            for path in (HOLD, UPDATE, RELEASE, DROP):
                worker.scripts[path][0] = noting(worker.id, path, worker.scripts[path][0])
        done = await client.post(f"/models/{model_of(harness)}{UPDATE}", json=BODY)
        assert done.status_code == 200, done.text
        assert order == [HOLD, HOLD, UPDATE, UPDATE, RELEASE, RELEASE, DROP, DROP]
        assert done.json()["dropped_pages"] == 10
        assert done.json()["workers"] == {prefill.id: UPDATED, decode.id: UPDATED}
        assert list(bodies(prefill, HOLD)) == [{"abort": False, "timeout_s": 5.0}]
        assert list(bodies(prefill, UPDATE)) == [{"model_path": "/new", "weight_version": "7"}]
        [one], [other] = bodies(prefill, RELEASE), bodies(decode, RELEASE)
        assert one == other
        await served(harness)
        assert (await harness.chat()).status == 200


async def test_where_one_cannot_be_held_nothing_is_changed() -> None:
    async with admin() as (harness, prefill, decode, client):
        willing(prefill)
        says(decode, HOLD, 409, {"error": {"message": "2 requests still run", "code": "still_running"}})
        refused = await client.post(f"/models/{model_of(harness)}{UPDATE}", json=BODY)
        assert refused.status_code == 409
        assert "Nothing was changed" in refused.json()["error"]["message"]
        assert "2 requests still run" in refused.json()["error"]["message"]
        assert steps(prefill) == [HOLD, RELEASE]
        assert steps(decode) == [HOLD]
        assert not any(one.drained for one in harness.router.fleet.workers)


async def test_a_worker_that_does_not_take_the_weights_is_named_and_old_pages_stay() -> None:
    async with admin() as (harness, prefill, decode, client):
        willing(prefill)
        willing(decode)
        decode.scripts[UPDATE].clear()
        says(decode, UPDATE, 400, {"success": False, "message": "no such tensor"})
        failed = await client.post(f"/models/{model_of(harness)}{UPDATE}", json=BODY)
        assert failed.status_code == 502
        assert f"{decode.id}: status 400: no such tensor" in failed.json()["error"]["message"]
        assert steps(decode) == [HOLD, UPDATE, RELEASE]
        assert not any(one.drained for one in harness.router.fleet.workers)


@pytest.mark.parametrize(("model", "body", "status"), [("nobody", BODY, 404), ("", {}, 400), ("", [1], 400)])
async def test_what_cannot_be_meant_is_refused(model: str, body: Any, status: int) -> None:
    async with admin() as (harness, prefill, _, client):
        path = f"/models/{model or model_of(harness)}{UPDATE}"
        assert (await client.post(path, content=json.dumps(body))).status_code == status
        assert steps(prefill) == []


@pytest.mark.parametrize(
    "said",
    [{}, {"earlier_namespaces": 5}, {"earlier_namespaces": ["n"] * 1000}, {"earlier_namespaces": [{}]}],
)
async def test_a_worker_that_answers_a_release_otherwise_is_named_and_drops_nothing(said: Any) -> None:
    async with admin() as (harness, prefill, decode, client):
        willing(prefill)
        willing(decode)
        decode.scripts[RELEASE].clear()
        says(decode, RELEASE, 200, said)
        failed = await client.post(f"/models/{model_of(harness)}{UPDATE}", json=BODY)
        assert failed.status_code == 502, failed.text
        assert decode.id in failed.json()["error"]["message"]
        assert DROP not in [*steps(prefill), *steps(decode)]
        assert not any(one.drained for one in harness.router.fleet.workers)


async def test_a_worker_that_says_no_number_of_dropped_pages_has_dropped_none() -> None:
    async with admin() as (harness, prefill, decode, client):
        willing(prefill)
        willing(decode)
        decode.scripts[DROP].clear()
        says(decode, DROP, 200, {"dropped_pages": "many"})
        done = await client.post(f"/models/{model_of(harness)}{UPDATE}", json=BODY)
        assert (done.status_code, done.json()["dropped_pages"]) == (200, 5)


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "a/b/c", "weights/hold"])
@pytest.mark.parametrize("slash", ["/", "%2F"])
async def test_a_model_whose_name_has_slashes_is_addressed_by_it(model: str, slash: str) -> None:
    async with admin(model) as (_, prefill, decode, client):
        path = f"/models/{model.replace('/', slash)}"
        for worker in (prefill, decode):
            willing(worker, earlier=())
        assert (await client.post(path + UPDATE, json=BODY)).status_code == 200
        assert steps(prefill) == steps(decode) == [HOLD, UPDATE, RELEASE]
        unknown = await client.post(f"{path}/x{UPDATE}", json=BODY)
        assert (unknown.status_code, f"{model}/x" in unknown.json()["error"]["message"]) == (404, True)
