"""The ordinary routes, joining and leaving, readiness, metrics."""

from __future__ import annotations

import asyncio
import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.errors import ConfigError, StartupError
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


def json_of(body: bytes) -> Script:
    """This, given out as JSON."""

    async def run(wire: Wire, request: Received) -> None:
        await wire.body(200, body)

    return run


async def until(harness: Harness, worker: MockWorker, ready: bool) -> None:
    """Until the router's probes have found `worker` so."""
    seen = harness.router.fleet.by_id[worker.id]
    await harness.until(lambda: (seen.ready and seen.refused is None) == ready)


async def test_models_are_listed_and_what_is_not_there_is_refused_in_openais_form() -> None:
    async with disagg() as (harness, _, _):
        listed = (await harness.get("/v1/models")).json()
        [card] = listed["data"]
        assert (listed["object"], card["object"]) == ("list", "model")
        assert (card["id"], card["max_model_len"]) == ("m", 4096)
        assert (await harness.get("/v1/models/m")).json() == card
        for path in ("/v1/models/x", "/v1/nothing"):
            response = await harness.get(path)
            assert response.status == 404
            assert path.rpartition("/")[2] in response.error["message"]


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


async def test_workers_may_come_after_the_router() -> None:
    decode = MockWorker("decode")
    await decode.start()
    await decode.stop()
    async with routed(RouterConfig(decode=(decode.url,), deadlines=PATIENT, probe=OFTEN)) as harness:
        response = await harness.chat()
        assert response.status == 503
        assert response.headers["retry-after"]
        await decode.start(decode.port)
        await until(harness, decode, True)
        assert (await harness.chat()).body == ANSWER
        await decode.stop()


async def test_workers_that_do_not_fit_stop_the_router_at_start() -> None:
    prefill = MockWorker("prefill")
    decode = MockWorker("decode", page_size=32)
    async with workers(prefill, decode):
        with pytest.raises(StartupError) as caught:
            async with open_router(RouterConfig(prefill=(prefill.url,), decode=(decode.url,))):
                pass
        said = str(caught.value)
        assert all(word in said for word in ("page_size", prefill.id, decode.id))
        assert "\n" not in said


async def test_a_router_that_starts_again_serves_with_the_workers_that_fit() -> None:
    good, odd = MockWorker("decode"), MockWorker("decode", model="other")
    async with workers(good, odd):
        config = RouterConfig(decode=(good.url, odd.url), models=("m",))
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


@pytest.mark.parametrize("host", ["10.0.0.256", "a..b"])
async def test_a_worker_whose_name_cannot_be_looked_up_leaves_the_others_probed(host: str) -> None:
    async with disagg(probe=OFTEN) as (harness, _, [good]):
        nowhere = harness.router.fleet.members.join("http://127.0.0.1:1", "decode")
        nowhere.id = f"{host}:1"
        await harness.until(lambda: nowhere.probe_failures > 1)
        good.ready = False
        await until(harness, good, False)


async def test_a_worker_that_answers_drop_by_drop_leaves_the_others_probed() -> None:
    async def drip(wire: Wire, request: Received) -> None:
        await wire.head(200, "application/json")
        while True:
            await wire.chunk(b" ")
            await asyncio.sleep(0.05)

    async with disagg(decode=2, probe=OFTEN) as (harness, _, [good, odd]):
        odd.script("/pd/ready", *[drip] * 100)
        await until(harness, odd, False)
        good.ready = False
        await until(harness, good, False)


@pytest.mark.parametrize("path", ["/pd/ready", "/pd/info"])
@pytest.mark.parametrize(
    "script", [hang(), json_of(NESTED), json_of(ODD)], ids=["silent", "nested", "undecodable"]
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
    [answer(404, {"detail": "Not Found"}), answer(200, {"role": "boss"}), json_of(NESTED), json_of(ODD)],
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


async def test_no_configured_policy_of_that_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'round_robin'"):
        async with open_router(RouterConfig(decode=("http://127.0.0.1:1",), decode_policy="round-robin")):
            pass


METRICS = """
requests_total requests_in_flight time_to_first_byte_seconds_bucket prefill_total settle_total
decode_retries_total client_aborts_total stream_errors_total prompt_tokens_total prompt_cached_tokens_total
prefill_missing_pages_total worker_requests_in_flight worker_healthy worker_circuit_open worker_refused
joins_refused_total sessions upstream_connections_total upstream_connections_open upstream_connections_idle
tenant_requests_total tenant_tokens_total tenant_running tenant_waiting queue_wait_seconds_bucket
unknown_keys_total unread_keys_total
"""


async def test_metrics_keep_their_names() -> None:
    async with disagg() as (harness, _, [decode]):
        decode.script(CHAT, answer(503, {}))
        for _ in range(3):
            await harness.chat(user="u")
        text = (await harness.get("/metrics")).body.decode()
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        names = {sample.name.removeprefix("pdserve_router_") for sample in samples}
        assert set(METRICS.split()) - names <= {
            "decode_retries_total",
            "client_aborts_total",
            "stream_errors_total",
        }
        by_status = {
            s.labels["status"]: s.value for s in samples if s.name == "pdserve_router_requests_total"
        }
        assert by_status == {"200": 2.0, "503": 1.0}
        healthy = [s for s in samples if s.name == "pdserve_router_worker_healthy"]
        assert {(s.labels["worker"], s.value) for s in healthy} >= {(decode.id, 1.0)}


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
    ours = [row for row in rows if row["logger"].startswith("pdserve.router.dispatch.")]
    assert {"mine-1"} < {row["request"] for row in ours}  # and the long one's
    said = [row["message"] for row in ours if row["request"] == "mine-1"]
    assert len(said) == 5, said  # the prefill worker, and of both decode workers: the choice, the failure
