"""Routes that would change a worker's weights are refused; others pass."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pdserve.engine.http.fixed_weights import FixedWeights


def ask(path: str) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "passed"})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(FixedWeights(app)({"type": "http", "path": path}, receive, send))
    return sent


@pytest.mark.parametrize("path", ["/update_weights_from_disk", "/update_weights_from_tensor/"])
def test_new_weights_are_refused(path: str) -> None:
    start, body = ask(path)
    assert start["status"] == 403
    assert "start a worker" in json.loads(body["body"])["error"]["message"]


@pytest.mark.parametrize("path", ["/load_lora_adapter", "/load_lora_adapter_from_tensors"])
def test_adapters_are_there_from_the_start(path: str) -> None:
    start, body = ask(path)
    assert start["status"] == 403
    assert "--lora-paths" in json.loads(body["body"])["error"]["message"]


@pytest.mark.parametrize("path", ["/generate", "/unload_lora_adapter", "/update_weight_version"])
def test_other_routes_pass(path: str) -> None:
    assert ask(path) == [{"type": "passed"}]
