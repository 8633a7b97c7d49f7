"""What the router needs of workers, as checks that the mock (tests/router/test_worker_contract.py) and real
workers (tests/e2e/test_worker_contract.py) both pass. Each takes a client of the worker and its model's name.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec

from pdserve.router.api.endpoints import ENDPOINTS
from pdserve.router.fleet.worker import WorkerInfo, WorkerLoad, foreign_info
from pdserve.router.metrics.names import CACHES, TIERS
from pdserve.router.proxy.prefill import PrefillReport, SettledReport, one_token_body
from pdserve.router.request.reports import parse_cached, parse_timing
from pdserve.router.request.stream_marks import MARK, StreamMarks

Check = Callable[[httpx.AsyncClient, str], Awaitable[None]]
HEADERS = {"x-request-id": "contract-1"}
CHAT = "/v1/chat/completions"
ENDPOINT = {"endpoint": CHAT}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def body(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} | more


async def streamed(client: httpx.AsyncClient, path: str, **asked: Any) -> tuple[httpx.Response, list[bytes]]:
    """An answered stream: its head, and its events and comments."""
    async with client.stream("POST", path, **asked) as response:
        data = b"".join([piece async for piece in response.aiter_raw()])
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert data.endswith(b"data: [DONE]\n\n")
    return response, [part + b"\n\n" for part in data.split(b"\n\n") if part]


def text_of(events: list[bytes]) -> str:
    chunks = [json.loads(one[6:]) for one in events if one.startswith(b"data: {")]
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


async def a_worker_describes_itself(client: httpx.AsyncClient, model: str) -> None:
    ready = (await client.get("/pd/ready")).json()
    assert ready["ready"] is True
    msgspec.convert(ready["load"], WorkerLoad | None)
    info = msgspec.json.decode((await client.get("/pd/info")).content, type=WorkerInfo)
    assert info.context_length > 0
    assert info.page_size > 0
    assert info.namespace
    assert info.kv_geometry


async def an_answer_is_json(client: httpx.AsyncClient, model: str) -> None:
    response = await client.post(CHAT, json=body(model), headers=HEADERS)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("application/json")
    assert response.json()["choices"][0]["finish_reason"]


async def a_stream_is_whole_events_that_end_in_done(client: httpx.AsyncClient, model: str) -> None:
    _, events = await streamed(client, CHAT, json=body(model, stream=True), headers=HEADERS)
    assert all(event.startswith(b"data: ") for event in events)
    assert json.loads(events[0][6:])["object"] == "chat.completion.chunk"


async def headers_tell_where_the_prompt_came_from_and_what_took_how_long(
    client: httpx.AsyncClient, model: str
) -> None:
    response = await client.post(CHAT, json=body(model), headers=HEADERS)
    streaming, _ = await streamed(client, CHAT, json=body(model, stream=True), headers=HEADERS)
    for answered in (response, streaming):
        tokens = parse_cached(answered.headers["x-pdserve-cached"])
        assert set(tokens) == set(TIERS)
        assert sum(tokens.values()) == response.json()["usage"]["prompt_tokens"]
        assert "compute" in parse_timing(answered.headers["server-timing"])


async def a_stream_has_marks_when_they_are_asked_for(client: httpx.AsyncClient, model: str) -> None:
    asked = body(model, stream=True, temperature=0)
    response, parts = await streamed(client, CHAT, json=asked, headers={**HEADERS, "x-pdserve-marks": "1"})
    assert response.headers["x-pdserve-marks"] == "1"
    marks = [list(map(int, part.removeprefix(MARK).split())) for part in parts if part.startswith(MARK)]
    assert marks
    tokens = 0
    for _, first, *token_ids in marks:  # every token is told once, in order
        assert first == tokens
        tokens += len(token_ids)
    assert marks[-1][0] <= len(text_of(parts))
    _, unmarked = await streamed(client, CHAT, json=asked, headers=HEADERS)
    assert text_of(unmarked) == text_of(parts)


async def a_lost_stream_goes_on_from_any_of_its_marks(client: httpx.AsyncClient, model: str) -> None:
    asked = json.dumps(body(model, stream=True, temperature=0)).encode()
    headers = {**HEADERS, "x-pdserve-marks": "1", "content-type": "application/json"}
    _, parts = await streamed(client, CHAT, content=asked, headers=headers)
    ends = [place + 1 for place, part in enumerate(parts) if part.startswith(MARK)]
    for end in ends:
        marks = StreamMarks()
        marks.begin(is_marked=True)
        before = marks.take(b"".join(parts[:end]))
        response, rest = await streamed(
            client, "/pd/continue", params=ENDPOINT, content=marks.continue_body(asked), headers=headers
        )
        assert response.headers["x-pdserve-marks"] == "1"
        assert text_of([*before.split(b"\n\n"), *rest]) == text_of(parts)


async def what_cannot_be_continued_is_refused(client: httpx.AsyncClient, model: str) -> None:
    asked = json.dumps(body(model, stream=True)).encode()
    for line in (b"", b"nonsense", b'{"characters": "x", "token_ids": []}'):
        response = await client.post("/pd/continue", params=ENDPOINT, content=line + b"\n" + asked)
        assert response.status_code == 400


async def a_pull_is_answered(client: httpx.AsyncClient, model: str) -> None:
    response = await client.post("/pd/pull", params=ENDPOINT, json=body(model), headers=HEADERS)
    assert response.status_code == 200
    assert isinstance(response.json()["pulled_tokens"], int | None)


async def a_worker_tells_whether_a_request_is_settled(client: httpx.AsyncClient, model: str) -> None:
    await client.post(CHAT, json=body(model), headers={"x-request-id": "contract-2"})
    asked = {"request_id": "contract-2", "timeout_s": 5.0}
    response = await client.post("/pd/settled", json=asked)
    assert response.status_code == 200
    report = msgspec.json.decode(response.content, type=SettledReport)
    assert report.known


async def a_prefill_is_reported(client: httpx.AsyncClient, model: str) -> None:
    asked = body(model)
    response = await client.post("/pd/prefill", params=ENDPOINT, json=asked, headers=HEADERS)
    assert response.status_code == 200
    report = msgspec.json.decode(response.content, type=PrefillReport)
    report.check()
    assert set(response.json()["cached"]) == set(CACHES)
    assert report.cached is not None
    assert 0 <= sum(msgspec.structs.astuple(report.cached)) <= report.prompt_tokens > 0
    assert len(report.cached_by_prompt) == 1
    assert report.prefill_ms > 0


async def what_is_no_request_is_not_computed(client: httpx.AsyncClient, model: str) -> None:
    response = await client.post("/pd/prefill", params=ENDPOINT, content=b"{nonsense", headers=HEADERS)
    assert response.status_code == 400


async def the_router_finds_out_what_it_is(client: httpx.AsyncClient, model: str) -> None:
    if (await client.get("/pd/ready")).status_code != 404:
        await a_worker_describes_itself(client, model)
        return
    assert (await client.get("/health")).status_code == 200
    assert foreign_info((await client.get("/v1/models")).content).model == model


async def a_prompt_is_computed_for_one_token(client: httpx.AsyncClient, model: str) -> None:
    asked = body(model, stream=True, stream_options={"include_usage": True}, min_tokens=2, tools=[TOOL])
    one_token = one_token_body(ENDPOINTS[CHAT], json.dumps(asked).encode())
    response = await client.post(
        CHAT, content=one_token, headers={**HEADERS, "content-type": "application/json"}
    )
    assert response.status_code == 200
    assert response.json()["choices"][0]["finish_reason"]


ANY_ENGINE: list[Check] = [
    the_router_finds_out_what_it_is,
    an_answer_is_json,
    a_stream_is_whole_events_that_end_in_done,
    a_prompt_is_computed_for_one_token,
]
"""What a server of any engine must pass."""
CHECKS: dict[str, list[Check]] = {
    "decode": [
        a_worker_describes_itself,
        an_answer_is_json,
        a_stream_is_whole_events_that_end_in_done,
        headers_tell_where_the_prompt_came_from_and_what_took_how_long,
        a_stream_has_marks_when_they_are_asked_for,
        a_lost_stream_goes_on_from_any_of_its_marks,
        what_cannot_be_continued_is_refused,
        a_pull_is_answered,
        a_worker_tells_whether_a_request_is_settled,
    ],
    "prefill": [a_worker_describes_itself, a_prefill_is_reported, what_is_no_request_is_not_computed],
}
CASES = [(role, check) for role, checks in CHECKS.items() for check in checks]
IDS = [f"{role}-{check.__name__}" for role, check in CASES]
