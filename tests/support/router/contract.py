"""What the router needs of a decode worker, as checks that the mock (test_contract.py) and a real worker
(tests/e2e/test_worker_contract.py) both pass. Each takes a client of the worker and its model's name.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec

from pdserve.router.dispatch.settle import SettledReport
from pdserve.router.fleet.worker import WorkerInfo, WorkerLoad

Check = Callable[[httpx.AsyncClient, str], Awaitable[None]]
HEADERS = {"x-request-id": "contract-1"}


def body(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} | more


async def a_worker_describes_itself(client: httpx.AsyncClient, model: str) -> None:
    assert (await client.get("/pd/ready")).json()["ready"] is True
    info = msgspec.json.decode((await client.get("/pd/info")).content, type=WorkerInfo)
    assert info.context_length > 0
    assert info.page_size > 0
    assert info.namespace
    assert info.kv_geometry


async def an_answer_is_json(client: httpx.AsyncClient, model: str) -> None:
    response = await client.post("/v1/chat/completions", json=body(model), headers=HEADERS)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("application/json")
    assert response.json()["choices"][0]["finish_reason"]


async def a_stream_is_whole_events_that_end_in_done(client: httpx.AsyncClient, model: str) -> None:
    asked = client.stream("POST", "/v1/chat/completions", json=body(model, stream=True), headers=HEADERS)
    async with asked as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        pieces = [piece async for piece in response.aiter_raw()]
    text = b"".join(pieces)
    assert text.endswith(b"data: [DONE]\n\n")
    events = [event for event in text.split(b"\n\n") if event]
    assert all(event.startswith(b"data: ") for event in events)
    assert json.loads(events[0][6:])["object"] == "chat.completion.chunk"


async def a_worker_tells_whether_a_request_is_settled(client: httpx.AsyncClient, model: str) -> None:
    await client.post("/v1/chat/completions", json=body(model), headers={"x-request-id": "contract-2"})
    asked = {"request_id": "contract-2", "timeout_s": 5.0}
    response = await client.post("/pd/settled", json=asked)
    assert response.status_code == 200
    report = msgspec.json.decode(response.content, type=SettledReport)
    assert report.known


async def a_workers_load_is_of_the_form_the_router_reads(client: httpx.AsyncClient, model: str) -> None:
    msgspec.convert((await client.get("/pd/ready")).json()["load"], WorkerLoad | None)


CHECKS: list[Check] = [
    a_worker_describes_itself,
    a_workers_load_is_of_the_form_the_router_reads,
    an_answer_is_json,
    a_stream_is_whole_events_that_end_in_done,
    a_worker_tells_whether_a_request_is_settled,
]
