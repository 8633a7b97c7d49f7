"""What a worker says of itself, as the router reads it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from pdserve.engine.worker import _info_router
from pdserve.pages import KvGeometry
from pdserve.router.fleet.worker import WorkerInfo


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_worker_says_whether_a_seed_counts(deterministic: bool) -> None:
    server_args = SimpleNamespace(chat_template=None, enable_deterministic_inference=deterministic)
    manager = SimpleNamespace(
        served_model_name="m",
        model_config=SimpleNamespace(context_len=9),
        is_generation=True,
        tokenizer=None,
        server_args=server_args,
    )
    geometry = KvGeometry(
        model="m", dtype="half", kv_dtype="half", page_size="64", layout="l", tp_size="1", pp_size="1"
    )
    worker: Any = SimpleNamespace(
        role="agg",
        namespace="ns",
        identity=SimpleNamespace(geometry=geometry),
        engine=SimpleNamespace(tokenizer_manager=manager),
        config=SimpleNamespace(engine=SimpleNamespace(model_path="m")),
    )
    app = FastAPI()
    app.include_router(_info_router(worker))
    said = TestClient(app).get("/pd/info").content
    assert msgspec.json.decode(said, type=WorkerInfo).deterministic is deterministic
