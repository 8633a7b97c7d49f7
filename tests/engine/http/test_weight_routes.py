"""Routes that replace weights: held before, released after; refused where that cannot be."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pdserve.engine.http.weight_routes import FROM_DISK, WeightRoutes, _for_sglang
from pdserve.errors import RequestError


class Weights:
    """Notes what it is asked; `refuses`: a step and why."""

    def __init__(self, *, held: bool = False, refuses: dict[str, RequestError] | None = None) -> None:
        self.is_held = held
        self.steps: list[str] = []
        self._refuses = refuses or {}

    async def check(self, model_path: str) -> None:
        self._step("check", model_path)

    async def hold(self, *, abort: bool) -> None:
        self._step("hold", str(abort))
        self.is_held = True

    async def release(self) -> None:
        self._step("release")
        self.is_held = False

    async def replacing(self, model_path: str | None) -> None:
        self._step("replacing", str(model_path))

    def replaced(self, done: bool) -> None:
        self._step("replaced", str(done))

    def _step(self, name: str, *more: str) -> None:
        if name in self._refuses:
            raise self._refuses[name]
        self.steps.append(" ".join([name, *more]))


def ask(
    path: str, weights: Weights | None, body: bytes = b'{"model_path": "/new"}', status: int = 200
) -> tuple[int, Any, bytes]:
    """(status, answer, what SGLang got)"""
    sent: list[dict[str, Any]] = []
    got: list[bytes] = []

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        got.append((await receive())["body"])
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b'{"success": true}'})

    pieces = [{"type": "http.request", "body": body[:5], "more_body": True}]
    pieces += [{"type": "http.request", "body": body[5:], "more_body": False}]
    if path != FROM_DISK:
        pieces = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        return pieces.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(WeightRoutes(app, weights)({"type": "http", "path": path}, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"]), b"".join(got)


def test_an_update_from_disk_holds_and_releases_the_worker() -> None:
    weights = Weights()
    body = b'{"model_path": "/new", "abort_all_requests": true}'
    assert ask(FROM_DISK, weights, body) == (200, {"success": True}, body)
    assert weights.steps == ["check /new", "hold True", "replacing /new", "replaced True", "release"]


async def test_an_update_goes_on_when_its_caller_leaves() -> None:
    """SGLang hears of no client that has left: half-replaced weights would be of no model."""
    left = [{"type": "http.request", "body": b'{"model_path": "/new"}', "more_body": False}]

    async def receive() -> dict[str, Any]:
        return left.pop() if left else {"type": "http.disconnect"}

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        listening = asyncio.ensure_future(receive())
        await asyncio.sleep(0)
        assert not listening.done()
        listening.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def send(message: Any) -> None: ...

    weights = Weights()
    await WeightRoutes(app, weights)({"type": "http", "path": FROM_DISK}, receive, send)
    assert weights.steps[-2:] == ["replaced True", "release"]


def test_an_update_that_fails_is_released_too_and_its_answer_is_sglangs() -> None:
    weights = Weights()
    assert ask(FROM_DISK, weights, status=400)[0] == 400
    assert weights.steps[-2:] == ["replaced False", "release"]


def test_a_worker_that_others_hold_is_not_released() -> None:
    weights = Weights(held=True)
    assert ask(FROM_DISK, weights)[0] == 200
    assert weights.steps == ["check /new", "replacing /new", "replaced True"]


@pytest.mark.parametrize("path", ["/update_weights_from_tensor/", "/begin_weight_update"])
def test_other_updates_need_a_held_worker(path: str) -> None:
    status, said, got = ask(path, Weights())
    assert (status, said["error"]["code"], got) == (409, "not_held", b"")
    weights = Weights(held=True)
    assert ask(path, weights)[0] == 200
    assert weights.steps == ["replacing None", "replaced True"]


@pytest.mark.parametrize("step", ["check", "hold", "release"])
def test_what_cannot_be_done_is_said(step: str) -> None:
    weights = Weights(refuses={step: RequestError(409, "requests run", code="still_running")})
    status, said, got = ask(FROM_DISK, weights)
    assert (status, said["error"]["code"]) == (409, "still_running")
    assert bool(got) == (step == "release")


@pytest.mark.parametrize(
    "body", [b"{}", b"[1, 2, 3]", b"no json", b'{"model_path": 1, "x": "' + b"a" * 300_000]
)
def test_a_body_that_names_no_directory_is_refused(body: bytes) -> None:
    weights = Weights()
    assert ask(FROM_DISK, weights, body)[0] in (400, 413)
    assert weights.steps == []


def test_with_sglangs_own_storage_new_weights_are_refused() -> None:
    status, said, got = ask(FROM_DISK, None)
    assert (status, got) == (403, b"")
    assert "start a worker" in said["error"]["message"]


@pytest.mark.parametrize("path", ["/load_lora_adapter", "/load_lora_adapter_from_tensors"])
def test_adapters_are_there_from_the_start(path: str) -> None:
    status, said, _ = ask(path, Weights())
    assert status == 403
    assert "--lora-paths" in said["error"]["message"]


@pytest.mark.parametrize("path", ["/generate", "/unload_lora_adapter", "/update_weight_version"])
def test_other_routes_pass(path: str) -> None:
    assert ask(path, None, b"x") == (200, {"success": True}, b"x")


def test_a_pools_model_is_read_by_sglangs_loader_of_files() -> None:
    body = b'{"model_path": "pdserve://pool/m@2", "load_format": "remote", "weight_version": "2"}'
    assert json.loads(_for_sglang(body, "pdserve://pool/m@2")) == {
        "model_path": "pdserve://pool/m@2",
        "load_format": "auto",
        "weight_version": "2",
    }
    assert _for_sglang(b'{"model_path": "/new"}', "/new") == b'{"model_path": "/new"}'
