"""Which of a worker's routes are for whom."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pdserve.engine.http.guard import Guard, Starting

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
) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "passed"})

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    starting = Starting()
    if started:
        starting.end()
    headers = [(b"authorization", shown.encode())] if shown else []
    scope = {"type": type_, "path": path, "client": client, "server": ("10.9.9.9", 80), "headers": headers}
    asyncio.run(Guard(app, token, starting)(scope, receive, send))
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


def test_sglang_may_ask_itself_while_it_starts() -> None:
    for client in (NEAR, SELF):
        assert ask("/generate", client, started=False) == PASSED
    assert ask("/generate", FAR, started=False) != PASSED


def test_websockets_are_guarded_and_lifespan_is_not() -> None:
    assert ask("/v1/realtime", FAR, type_="websocket")[0]["type"] == "websocket.close"
    assert ask("/v1/realtime", FAR, f"Bearer {TOKEN}", type_="websocket") == PASSED
    assert ask("", None, type_="lifespan") == PASSED
