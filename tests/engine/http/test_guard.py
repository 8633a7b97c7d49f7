"""Which of a worker's routes are for whom."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.testclient import TestClient
from msgspec.structs import replace

from pdserve.engine.config import EngineConfig
from pdserve.engine.drain import Drain
from pdserve.engine.http.guard import Guard, close_cors
from pdserve.engine.launch import check_token
from pdserve.engine.worker import WorkerConfig
from pdserve.errors import ConfigError

TOKEN = "the-clusters-token-of-this-test"
FAR, NEAR, SELF = ("10.1.2.3", 5), ("127.0.0.1", 5), ("10.9.9.9", 5)
CONTROL = [
    "/flush_cache",
    "/update_weights_from_disk",
    "/hicache/storage-backend",
    "/hicache/storage-backend/clear",
    "/abort_request",
    "/pause_generation",
    "/get_weights_by_name",
    "/start_profile",
    "/server_info",
    "/v2/what-a-next-sglang-adds",
    "//flush_cache",
    "/v1x/",
]


def ask(
    path: str,
    client: Any = FAR,
    shown: str = "",
    *,
    token: str = TOKEN,
    started: bool = True,
    type_: str = "http",
    metrics_token: str = "",
    server: Any = ("10.9.9.9", 80),
    has_fixed_weights: bool = False,
) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "passed"})

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", shown.encode())] if shown else []
    scope = {"type": type_, "path": path, "client": client, "server": server, "headers": headers}
    drain = Drain(1.0, 0.0, set)
    guard = Guard(app, token, lambda: started, drain, metrics_token, has_fixed_weights=has_fixed_weights)
    asyncio.run(guard(scope, receive, send))
    assert drain.running == 0
    return sent


PASSED = [{"type": "passed"}]


@pytest.mark.parametrize(
    "path", [*CONTROL, "/pd/prefill", "/pd/info", "/v1/chat/completions", "/generate", "/health_generate"]
)
def test_with_a_token_nothing_but_health_is_open(path: str) -> None:
    for shown in ("", "Bearer wrong", f"Basic {TOKEN}", TOKEN, "Bearer "):
        for client in (FAR, NEAR, SELF):
            start, body = ask(path, client, shown)
            assert start["status"] == 401
            error = json.loads(body["body"])["error"]
            assert error["code"] == "invalid_cluster_token"
            assert TOKEN not in str(error)
    assert ask(path, FAR, f"Bearer {TOKEN}") == PASSED


@pytest.mark.parametrize("token", ["", TOKEN])
@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/metrics/", "/pd/ready"])
def test_health_and_metrics_are_open(path: str, token: str) -> None:
    assert ask(path, token=token) == PASSED


@pytest.mark.parametrize("token", ["", TOKEN])
@pytest.mark.parametrize("path", ["/metrics", "/metrics/"])
def test_metrics_with_a_token_are_for_who_shows_it_or_the_clusters(path: str, token: str) -> None:
    scrapers = "the-token-of-the-scrapers"
    for shown in ("", "Bearer wrong", f"Basic {scrapers}", "Bearer "):
        for client in (FAR, NEAR):
            start, body = ask(path, client, shown, token=token, metrics_token=scrapers)
            assert start["status"] == 401
            assert scrapers not in str(body)
    assert ask(path, FAR, f"Bearer {scrapers}", token=token, metrics_token=scrapers) == PASSED
    assert (ask(path, FAR, f"Bearer {TOKEN}", token=token, metrics_token=scrapers) == PASSED) == bool(token)
    assert ask("/health", FAR, token=token, metrics_token=scrapers) == PASSED
    if token:  # it opens nothing else
        assert ask("/flush_cache", FAR, f"Bearer {scrapers}", metrics_token=scrapers) != PASSED


@pytest.mark.parametrize("path", CONTROL)
def test_without_a_token_control_is_for_this_host(path: str) -> None:
    start, body = ask(path, FAR, token="")
    assert start["status"] == 403
    assert "cluster_token" in json.loads(body["body"])["error"]["message"]
    for client in (NEAR, SELF, ("::1", 5), ("::ffff:127.0.0.1", 5)):
        assert ask(path, client, token="") == PASSED
    for client in (None, ("unknown", 5), ("", 0)):
        assert ask(path, client, token="") != PASSED


@pytest.mark.parametrize(
    "path",
    ["/pd/prefill", "/pd/settled", "/v1/chat/completions", "/generate", "/tokenize", "/health_generate"],
)
def test_without_a_token_a_router_elsewhere_is_served(path: str) -> None:
    assert ask(path, FAR, token="") == PASSED


@pytest.mark.parametrize("token", ["", TOKEN])
@pytest.mark.parametrize("path", [*CONTROL, "/generate", "/v1/chat/completions", "/pd/info"])
def test_until_it_is_ready_a_worker_serves_nobody(path: str, token: str) -> None:
    for client in (NEAR, SELF, FAR):
        start, body = ask(path, client, token=token, started=False)
        assert start["status"] == (401 if token else 503)
        start, body = ask(path, client, f"Bearer {token}", token=token, started=False)
        assert start["status"] == 503
        assert json.loads(body["body"])["error"]["code"] == "worker_starting"
    assert ask("/health", FAR, token=token, started=False) == PASSED


def test_no_page_of_another_origin_reads_a_workers_answers() -> None:
    app = FastAPI()
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_credentials=True, allow_methods=["*"])
    app.get("/health")(lambda: "ok")
    close_cors(app)
    with TestClient(app) as client:
        asked = client.get("/health", headers={"origin": "http://evil.example"})
        preflight = client.options(
            "/health", headers={"origin": "http://evil.example", "access-control-request-method": "POST"}
        )
    assert asked.status_code == 200
    assert not [name for answer in (asked, preflight) for name in answer.headers if "access-control" in name]
    assert preflight.status_code == 405


def test_a_worker_without_a_token_starts_only_where_it_is_told_to() -> None:
    config = WorkerConfig(engine=EngineConfig(model_path=Path("m")))
    check_token(config, TOKEN)
    with pytest.raises(ConfigError, match="cluster_token_file or PDSERVE_CLUSTER_TOKEN"):
        check_token(config, "")
    check_token(replace(config, insecure=True), "")


def test_websockets_are_guarded_and_lifespan_is_not() -> None:
    assert ask("/v1/realtime", FAR, type_="websocket")[0]["type"] == "websocket.close"
    assert ask("/v1/realtime", FAR, f"Bearer {TOKEN}", type_="websocket") == PASSED
    assert ask("", None, type_="lifespan") == PASSED


FIXED = (
    "/update_weights_from_disk",
    "/update_weights_from_tensor/",
    "/begin_weight_update",
    "/load_lora_adapter",
)


@pytest.mark.parametrize("path", [*FIXED, "/generate", "/unload_lora_adapter", "/update_weight_version"])
def test_with_a_storage_weights_and_adapters_stay_those_of_the_start(path: str) -> None:
    shown = f"Bearer {TOKEN}"
    assert ask(path, FAR, shown) == PASSED
    answered = ask(path, FAR, shown, has_fixed_weights=True)
    assert (answered == PASSED) == (path not in FIXED)
    if path in FIXED:
        assert answered[0]["status"] == 403
        assert json.loads(answered[1]["body"])["error"]["code"] == "weights_fixed"
