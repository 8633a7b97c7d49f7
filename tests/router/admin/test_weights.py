"""New weights for all workers of a model: held together, updated, released; or left as they are."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from pdserve.router.admin.app import AdminApp
from pdserve.router.admin.weights import STEPS
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
STEPS_OF_TRAINERS = f"/{sorted(STEPS)[0]}"
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


async def test_a_trainer_updates_held_workers_itself() -> None:
    async with admin() as (harness, prefill, decode, client):
        willing(prefill)
        willing(decode)
        path = f"/models/{model_of(harness)}/weights"
        assert (await client.post(f"{path}/release")).status_code == 409
        held = await client.post(f"{path}/hold", json={"abort_all_requests": True})
        assert held.json() == {"held": [prefill.id, decode.id]}
        assert list(bodies(decode, HOLD)) == [{"abort": True, "timeout_s": 120.0}]
        assert all(one.drained for one in harness.router.fleet.workers)
        assert (await client.post(f"{path}/hold")).status_code == 409
        assert (await client.post(f"/models/{model_of(harness)}{UPDATE}", json=BODY)).status_code == 409
        assert (await client.post(f"{path}/release")).json()["dropped_pages"] == 10
        await served(harness)


async def test_a_trainers_steps_go_to_all_held_workers_and_a_body_for_each_to_its_own() -> None:
    async with admin() as (harness, prefill, decode, client):
        path = f"/models/{model_of(harness)}"
        for worker in (prefill, decode):
            willing(worker)
            for step in STEPS:
                says(worker, f"/{step}", 200, UPDATED)
        for step in STEPS:
            refused = await client.post(f"{path}/{step}", json={})
            assert refused.status_code == 409
            assert f"POST {path}/weights/hold before" in refused.json()["error"]["message"]
        await client.post(f"{path}/weights/hold")
        tensors = {"serialized_named_tensors": ["x" * 100_000], "weight_version": "8"}
        done = await client.post(f"{path}/update_weights_from_tensor", json=tensors)
        assert done.json() == {"workers": {prefill.id: UPDATED, decode.id: UPDATED}}
        each = {prefill.id: {"rank_offset": 1}, decode.id: {"rank_offset": 2}}
        assert (
            await client.post(f"{path}/init_weights_update_group", json={"workers": each})
        ).status_code == 200
        for worker in (prefill, decode):
            assert list(bodies(worker, "/update_weights_from_tensor")) == [tensors]
            assert list(bodies(worker, "/init_weights_update_group")) == [each[worker.id]]
        del each[decode.id]
        for wrong in ({"workers": each}, {"workers": 5}, [1]):
            refused = await client.post(f"{path}/end_weight_update", json=wrong)
            assert refused.status_code == 400
        assert (await client.post(f"{path}/weights/release")).json()["dropped_pages"] == 10
        [one], [other] = bodies(prefill, RELEASE), bodies(decode, RELEASE)
        assert one == other != {"id": ""}


async def test_workers_of_which_one_missed_a_step_share_no_pages() -> None:
    """The one that failed may not know that there was a step: it was not reached."""
    async with admin() as (harness, prefill, decode, client):
        willing(prefill)
        willing(decode)
        says(prefill, "/update_weights_from_tensor", 200, UPDATED)
        says(decode, "/update_weights_from_tensor", 503, {"message": "busy"})
        path = f"/models/{model_of(harness)}"
        await client.post(f"{path}/weights/hold")
        failed = await client.post(f"{path}/update_weights_from_tensor", json={})
        assert failed.status_code == 502
        assert f"{decode.id}: status 503: busy" in failed.json()["error"]["message"]
        released = await client.post(f"{path}/weights/release")
        assert released.status_code == 502
        assert f"{decode.id}: status 503: busy" in released.json()["error"]["message"]
        assert [*bodies(prefill, RELEASE), *bodies(decode, RELEASE)] == [{"id": ""}] * 2
        assert DROP not in [*steps(prefill), *steps(decode)]


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
            says(worker, HOLD, 200, {"held": True})
            says(worker, STEPS_OF_TRAINERS, 200, UPDATED)
            says(worker, RELEASE, 200, {"held": False, "earlier_namespaces": []})
        for target in (HOLD, STEPS_OF_TRAINERS, RELEASE):
            assert (await client.post(path + target, json={})).status_code == 200
        assert steps(prefill) == steps(decode) == [HOLD, STEPS_OF_TRAINERS, RELEASE]
        unknown = await client.post(f"{path}/x{UPDATE}", json=BODY)
        assert (unknown.status_code, f"{model}/x" in unknown.json()["error"]["message"]) == (404, True)
