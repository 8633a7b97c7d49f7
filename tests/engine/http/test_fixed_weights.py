"""A worker with a storage refuses new weights and adapters, and passes on everything else."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from pdserve.engine.http.fixed_weights import FixedWeights


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/update_weights_from_disk", 403),
        ("/update_weights_from_tensor/", 403),
        ("/begin_weight_update", 403),
        ("/load_lora_adapter", 403),
        ("/generate", 200),
        ("/unload_lora_adapter", 200),
        ("/update_weight_version", 200),
    ],
)
def test_weights_and_adapters_stay_those_of_the_start(path: str, status: int) -> None:
    app = FastAPI()
    app.add_api_route("/{path:path}", lambda path: {}, methods=["POST"])
    app.add_middleware(FixedWeights)
    answer = TestClient(app).post(path, json={})
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["code"] == "weights_fixed"
