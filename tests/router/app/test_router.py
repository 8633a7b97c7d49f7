"""The ordinary routes, joining and leaving, readiness, metrics."""

from __future__ import annotations

import asyncio
import json

import pytest

from pdserve.errors import StartupError
from pdserve.logs import configure_logs
from pdserve.router.api.endpoints import ENDPOINTS
from pdserve.router.app.lifespan import open_router
from pdserve.router.config.limits import Probe
from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.health_check import FirstRound
from tests.support.router.harness import CHAT, PATIENT, Harness, disagg, routed
from tests.support.router.mock_worker import (
    ANSWER,
    Gate,
    MockWorker,
    Received,
    Script,
    Wire,
    answer,
    close,
    hang,
    workers,
)

OFTEN = Probe(interval_s=0.02, timeout_s=0.5)
ONCE = Probe(interval_s=1000.0)
"""At the start only."""
NESTED = b'{"x":' + b"[" * 100_000
ODD = b'{"pool":"\xff","role":"\xff"}'


async def until(harness: Harness, worker: MockWorker, ready: bool) -> None:
    """Until the router's probes have found `worker` so."""
    seen = harness.router.fleet.by_id[worker.id]
    await harness.until(lambda: (seen.ready and seen.refused is None) == ready)


async def test_the_documentation_names_every_route() -> None:
    async with disagg() as (harness, _, _):
        paths = (await harness.get("/openapi.json")).json()["paths"]
        assert set(ENDPOINTS) <= set(paths)
        for path, operations in paths.items():
            for method in operations:
                target = path.replace("{model}", "m").replace("{response_id}", "x")
                said = await (
                    harness.get(target) if method == "get" else harness.post(target, {"model": "m"})
                )
                assert said.status not in (405, 500), (method, path)
        assert {"/v1/models", "/health", "/ready", "/metrics", "/v1/kv/hints"} <= set(paths)
        assert (await harness.get("/docs")).status == 200


async def test_readiness_follows_the_workers() -> None:
    async with disagg(probe=OFTEN) as (harness, [prefill], [decode]):
        state = (await harness.get("/ready")).json()
        assert state["ready"]
        assert state["degraded"] == []
        assert state["mode"] == "disagg"
        prefill.ready = False
        await until(harness, prefill, False)
        response = await harness.get("/ready")
        assert response.status == 200
        assert response.json()["degraded"] == ["no prefill worker is ready"]
        decode.ready = False
        await until(harness, decode, False)
        assert (await harness.get("/ready")).status == 503
        assert (await harness.get("/health")).status == 200
        assert (await harness.chat()).status == 503
        decode.ready = prefill.ready = True
        await until(harness, decode, True)
        await until(harness, prefill, True)
        assert (await harness.chat()).status == 200


async def test_workers_that_do_not_fit_stop_a_router_at_its_first_start_and_are_left_out_at_others() -> None:
    good, odd = MockWorker("prefill"), MockWorker("decode", page_size=32)
    async with workers(good, odd):
        config = RouterConfig(prefill=(good.url,), decode=(odd.url,))
        with pytest.raises(StartupError, match="page_size") as caught:
            async with open_router(config):
                pass
        said = str(caught.value)
        assert all(word in said for word in (good.id, odd.id))
        assert "\n" not in said
        async with open_router(config, first=FirstRound(strict=False)) as router:
            found = {worker.id: worker.refused is None for worker in router.fleet.workers}
            assert found == {good.id: True, odd.id: False}


def tell_info(worker: MockWorker) -> Gate:
    """Open once the worker has said what it serves."""
    gate = Gate()

    async def tell(wire: Wire, request: Received) -> None:
        await wire.json(200, worker.info)
        gate.open.set()

    worker.script("/pd/info", tell)
    return gate


@pytest.mark.parametrize(
    ("sizes", "refused", "fit"),
    [
        pytest.param([64, 32], [], [True, False], id="the first"),
        pytest.param([64, 32], [0], [False, True], id="what another process refuses"),
        pytest.param([32, 64, 64], [], [False, True, True], id="the most"),
        pytest.param([32, 64, 64], [1, 2], [True, False, False], id="that of many, too"),
        pytest.param([64, 32, 32, 64], [], [True, False, False, True], id="the first of as many"),
    ],
)
async def test_who_joins_at_a_start_is_not_who_answers_first(
    sizes: list[int], refused: list[int], fit: list[bool]
) -> None:
    found = [MockWorker("decode", page_size=size) for size in sizes]
    async with workers(*found):
        slow = next(worker for worker, fits in zip(found, fit, strict=True) if fits)
        told = [tell_info(worker) for worker in found if worker is not slow]

        async def last(wire: Wire, request: Received) -> None:
            await asyncio.gather(*(gate.open.wait() for gate in told))
            await wire.json(200, {"ready": True})

        slow.script("/pd/ready", last)
        config = RouterConfig(decode=tuple(worker.url for worker in found))
        first = FirstRound(strict=False, refused=[found[n].id for n in refused])
        async with open_router(config, first=first) as router:
            assert [worker.refused is None for worker in router.fleet.workers] == fit


async def drip(wire: Wire, request: Received) -> None:
    await wire.head(200, "application/json")
    while True:
        await wire.chunk(b" ")
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("path", ["/pd/ready", "/pd/info"])
@pytest.mark.parametrize(
    "script",
    [hang(), drip, answer(200, NESTED), answer(200, ODD)],
    ids=["silent", "by drops", "nested", "undecodable"],
)
async def test_a_worker_with_whom_a_probe_comes_to_no_end_leaves_the_others_probed(
    path: str, script: Script
) -> None:
    new, odd, asked = MockWorker("decode"), MockWorker("decode"), asyncio.Event()

    async def noted(wire: Wire, request: Received) -> None:
        asked.set()
        await script(wire, request)

    odd.script(path, *[noted] * 1000)
    patient = Probe(interval_s=0.02, timeout_s=600.0)
    async with workers(new, odd), disagg(probe=patient) as (harness, _, [good]):
        harness.router.fleet.members.join(odd.url, "decode")
        await asked.wait()
        for ready in (False, True):
            good.ready = ready
            await until(harness, good, ready)
        harness.router.fleet.members.join(new.url, "decode")
        await until(harness, new, True)


async def test_a_worker_that_has_left_is_no_longer_probed_until_it_comes_again() -> None:
    def probed() -> int:
        return sum("_keep_probing" in repr(task.get_coro()) for task in asyncio.all_tasks())

    async with disagg(probe=OFTEN) as (harness, _, [left]):
        await harness.until(lambda: probed() == 2)
        harness.router.fleet.members.leave(left.id)
        await harness.until(lambda: probed() == 1)
        harness.router.fleet.members.join(left.url, "decode")
        await until(harness, left, True)
        assert probed() == 2


async def test_a_worker_that_does_not_fit_is_refused_at_join(caplog: pytest.LogCaptureFixture) -> None:
    async with disagg(decode=2, probe=OFTEN) as (harness, _, [good, odd]):
        odd.ready = False
        await until(harness, odd, False)
        odd.info["kv_geometry"]["dtype"] = "bfloat16"
        odd.ready = True
        refused = harness.router.fleet.by_id[odd.id]
        await harness.until(lambda: refused.refused is not None)
        for _ in range(4):
            assert (await harness.chat()).headers["x-pdserve-decode"] == good.id
        odd.info["kv_geometry"]["dtype"] = "float32"
        await until(harness, odd, True)
        assert harness.stats.joins_refused == 1
    assert [r.message for r in caplog.records if "kv_geometry.dtype" in r.message]


@pytest.mark.parametrize(
    "said",
    [
        answer(404, {"detail": "Not Found"}),
        answer(200, {"role": "boss"}),
        answer(200, NESTED),
        answer(200, ODD),
    ],
)
async def test_a_worker_that_does_not_describe_itself_is_not_used(
    said: object, caplog: pytest.LogCaptureFixture
) -> None:
    decode = MockWorker("decode")
    decode.script("/pd/info", said)  # type: ignore[arg-type]
    async with (
        workers(decode),
        routed(RouterConfig(decode=(decode.url,), probe=ONCE, deadlines=PATIENT)) as harness,
    ):
        assert (await harness.chat()).status == 503
    assert "is it a pdserve worker?" in caplog.text


async def test_a_prefill_worker_that_dies_at_work_is_given_up_when_probes_notice() -> None:
    async with disagg(probe=OFTEN) as (harness, [prefill], _):
        gate = Gate()
        prefill.script("/pd/prefill", hang(gate))
        client = await harness.asking()
        await gate.reached.wait()
        prefill.ready = False  # it hangs on to the request, but says that it cannot work
        response = await client.response()
        assert response.body == ANSWER
        assert response.headers["x-pdserve-plan"].endswith("stage=down")


@pytest.mark.usefixtures("logs_as_before")
async def test_every_answer_and_every_line_of_the_log_has_the_requests_id(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What the client gave, if it is short and plain; otherwise one of the router's own."""
    configure_logs("json", "debug")
    async with disagg(decode=2) as (harness, [prefill], decodes):
        prefill.script("/pd/prefill", answer(500, {}))
        for worker in decodes:
            worker.script(CHAT, close())
        named = {"x-request-id": "mine-1"}
        assert (await harness.chat(headers=named)).headers["x-request-id"] == "mine-1"
        for path, status in (("/v1/models", 200), ("/nothing", 404)):
            response = await harness.get(path, {"x-request-id": "mine-2"})
            assert (response.status, response.headers["x-request-id"]) == (status, "mine-2")
        long = await harness.chat({"x-request-id": "x" * 129})
        assert len(long.headers["x-request-id"]) == 24
    rows = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    ours = [row for row in rows if row["logger"].startswith("pdserve.router.proxy.")]
    assert {"mine-1"} < {row["request"] for row in ours}  # and the long one's
    said = [row["message"] for row in ours if row["request"] == "mine-1"]
    assert len(said) == 5, said  # the prefill worker, and of both decode workers: the choice, the failure
