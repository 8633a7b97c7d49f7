"""What the router needs of a decode worker. The mock passes it, and a real one must:

PDSERVE_CONTRACT_WORKER=http://127.0.0.1:8201 pytest tests/router/test_contract.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest

from pdserve.router.dispatch import SettledReport
from pdserve.router.fleet import WorkerInfo

from .harness import run
from .mock_worker import MockWorker, workers

REAL = os.environ.get("PDSERVE_CONTRACT_WORKER")
Check = Callable[[httpx.AsyncClient, str], Awaitable[None]]
HEADERS = {"x-request-id": "contract-1"}


@pytest.fixture(params=["mock", pytest.param("real", marks=pytest.mark.skipif(not REAL, reason="no worker"))])
def worker(request: pytest.FixtureRequest) -> Callable[[Check], None]:
    """Runs a check against a worker's URL and its model's name."""

    async def main(check: Check) -> None:
        mock = MockWorker("decode")
        async with workers(mock):
            url = mock.url if request.param == "mock" else str(REAL)
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                model = (await client.get("/pd/info")).json()["model"]
                await check(client, model)

    return lambda check: run(main(check), timeout_s=120)


def body(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} | more


def test_a_worker_describes_itself(worker: Callable[[Check], None]) -> None:
    async def check(client: httpx.AsyncClient, model: str) -> None:
        assert (await client.get("/pd/ready")).json()["ready"] is True
        info = msgspec.json.decode((await client.get("/pd/info")).content, type=WorkerInfo)
        assert info.context_length > 0
        assert info.page_size > 0
        assert info.namespace
        assert info.kv_geometry

    worker(check)


def test_an_answer_is_json(worker: Callable[[Check], None]) -> None:
    async def check(client: httpx.AsyncClient, model: str) -> None:
        response = await client.post("/v1/chat/completions", json=body(model), headers=HEADERS)
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("application/json")
        assert response.json()["choices"][0]["finish_reason"]

    worker(check)


def test_a_stream_is_whole_events_that_end_in_done(worker: Callable[[Check], None]) -> None:
    async def check(client: httpx.AsyncClient, model: str) -> None:
        asked = client.stream("POST", "/v1/chat/completions", json=body(model, stream=True), headers=HEADERS)
        async with asked as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            pieces = [piece async for piece in response.aiter_raw()]
        text = b"".join(pieces)
        assert text.endswith(b"data: [DONE]\n\n")
        events = [event for event in text.split(b"\n\n") if event]
        assert all(event.startswith(b"data: ") for event in events)
        assert json.loads(events[0][6:])["object"] == "chat.completion.chunk"

    worker(check)


def test_a_worker_tells_whether_a_request_is_settled(worker: Callable[[Check], None]) -> None:
    async def check(client: httpx.AsyncClient, model: str) -> None:
        await client.post("/v1/chat/completions", json=body(model), headers={"x-request-id": "contract-2"})
        asked = {"request_id": "contract-2", "timeout_s": 5.0}
        response = await client.post("/pd/settled", json=asked)
        assert response.status_code == 200
        report = msgspec.json.decode(response.content, type=SettledReport)
        assert report.known

    worker(check)
