"""Requests as clients, proxies and monitors write them: codings, methods, paths, content types, odd text."""

from __future__ import annotations

import gzip
import json

import pytest
import zstandard

from pdserve.router.api.endpoints import ENDPOINTS
from pdserve.router.config.limits import Limits
from pdserve.router.config.tenants import Access
from tests.support.router.harness import CHAT, Harness, chat_body, disagg
from tests.support.router.mock_worker import ANSWER, MockWorker

BODY = json.dumps(chat_body(user="u" * 3000)).encode()
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
SOMETHING = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "prompt": "hi",
    "input": "hi",
    "text": "hi",
    "query": "hi",
    "documents": ["hi"],
    "items": ["hi"],
    "label_token_ids": [1],
    "tokens": [1],
    "max_tokens": 1,
}
"""A body for any endpoint."""


# --- content codings


async def test_workers_get_a_coded_body_decoded() -> None:
    """Each coding alone is in test_content_coding.py."""
    async with disagg() as (harness, [prefill], [decode]):
        data = zstandard.compress(gzip.compress(BODY))
        answer = await harness.post(CHAT, data, {"content-encoding": "gzip, zstd"})
        assert answer.body == ANSWER
        for request in (*prefill.requests, *decode.requests):
            assert request.body == BODY
            assert request.headers["content-length"] == str(len(BODY))
            assert "content-encoding" not in request.headers


async def test_an_unknown_coding_is_refused_by_its_name_in_the_apis_own_form() -> None:
    async with disagg() as (harness, [prefill], [decode]):
        for path in (CHAT, MESSAGES):
            answer = await harness.post(path, BODY, {"content-encoding": "snappy-ish"})
            assert answer.status == 415
            assert "gzip" in answer.headers["accept-encoding"]
            assert ("type" in answer.json()) == (path == MESSAGES)
            assert "snappy-ish" in answer.json()["error"]["message"]
        assert prefill.requests == decode.requests == []


async def test_a_bomb_is_refused_within_the_bound_of_bodies_and_what_was_held_is_let_go() -> None:
    bomb = gzip.compress(b" " * (64 << 20))
    async with disagg(limits=Limits(body_bytes=1 << 20, held_body_bytes=2 << 20)) as (harness, _, _):
        for _ in range(4):
            assert (await harness.post(CHAT, bomb, {"content-encoding": "gzip"})).status == 413
        assert (await harness.post(CHAT, gzip.compress(BODY), {"content-encoding": "gzip"})).status == 200


# --- methods


async def test_head_says_what_get_says_and_an_unknown_method_is_refused_with_those_that_are_known() -> None:
    async with disagg() as (harness, _, _):
        client = await harness.connect()  # which stays
        for path in ("/health", "/ready", "/metrics", "/v1/models", "/v1/models/m", "/v1/models/x", "/docs"):
            await client.send(path, b"", method="HEAD")
            head = await client.head()
            await client.send(path, b"", method="GET")
            whole = await client.response()
            assert (path, head.status) == (path, whole.status)
            assert head.headers["content-type"] == whole.headers["content-type"]
        for path, allowed in ((CHAT, "POST"), (CHAT + "?a=b", "POST"), ("/v1/models", "GET, HEAD")):
            for method in {"HEAD", "GET", "PUT", "DELETE"} - set(allowed.split(", ")):
                await client.send(path, b"", method=method)
                answer = await (client.head() if method == "HEAD" else client.response())
                assert (answer.status, answer.headers["allow"]) == (405, allowed)
                if method != "HEAD":
                    assert "message" in answer.error


# --- paths


ALIKE = [f"{CHAT}/", f"/{CHAT}", "/v1//chat/completions", "/v1/chat/%63ompletions"]
MEANT = [
    ("POST", "/chat/completions", CHAT),
    ("POST", "/v1/v1/chat/completions", CHAT),
    ("POST", "/openai/v1/chat/completions", CHAT),
    ("POST", "/completions", "/v1/completions"),
    ("POST", "/v1/v1/messages?beta=true", MESSAGES),
    ("POST", "/messages/count_tokens", "/v1/messages/count_tokens"),
    ("POST", "/v1/generate", "/generate"),
    ("GET", "/models", "/v1/models"),
    ("GET", "/v1/v1/models", "/v1/models"),
    ("GET", "/v1/health", "/health"),
    ("GET", "/metrics/", "/metrics"),
]


async def test_slashes_too_many_change_nothing_and_a_path_that_is_nearly_right_is_told_its_like() -> None:
    async with disagg() as (harness, _, [decode]):
        for path in ALIKE:
            assert (await harness.post(path, chat_body())).body == ANSWER
        assert {request.path for request in decode.requests} == {CHAT}
        assert harness.stats.requests == {(CHAT, "200"): len(ALIKE)}
        assert (await harness.get("/v1/models/")).json() == (await harness.get("/v1/models")).json()
        assert (await harness.get("//health")).status == 200
        client = await harness.connect()
        for method, path, meant in MEANT:
            await client.send(path, b"{}", method=method)
            answer = await client.response()
            said = answer.json()
            assert answer.status == 404
            assert said["error"]["message"].endswith(f"; did you mean {meant}?")
            assert said["error"]["message"].startswith(f"{method} {path.partition('?')[0]}: ")
            assert ("type" in said) == meant.startswith(MESSAGES), "the API's own form"
        for path in ("/", "/nothing", "/v1", "/v1/", "/" + "x" * 5000):
            answer = await harness.get(path)
            assert answer.status == 404
            assert "did you mean" not in answer.error["message"]
            assert len(answer.error["message"]) < 300


# --- content types and text


JSON_PATHS = [path for path, row in ENDPOINTS.items() if not (row.is_form or row.is_hint)]


async def everywhere(harness: Harness, body: bytes) -> dict[str, int]:
    """The status of this body at each endpoint that takes JSON."""
    return {path: (await harness.post(path, body)).status for path in JSON_PATHS}


class AnyWorker(MockWorker):
    """Has embeddings too."""

    def __init__(self, role: str) -> None:
        super().__init__(role, tasks=["generate", "embed"])


async def test_json_is_json_whatever_its_content_type_is_said_to_be_and_after_a_byte_order_mark() -> None:
    body = json.dumps(SOMETHING).encode()
    types = (None, "", "text/plain", "application/x-www-form-urlencoded", "application/json; charset=x")
    async with disagg(prefill=0, make=AnyWorker) as (harness, _, [worker]):
        for content_type in types:
            for path in JSON_PATHS:
                client = await harness.connect()
                line = "" if content_type is None else f"content-type: {content_type}\r\n"
                head = f"POST {path} HTTP/1.1\r\nhost: t\r\n{line}content-length: {len(body)}\r\n\r\n"
                client.writer.write(head.encode() + body)
                assert (path, (await client.response()).status) == (path, 200)
        statuses = await everywhere(harness, b"\xef\xbb\xbf" + body)
        assert set(statuses.values()) == {200}, statuses
        assert all(request.body.startswith(b"{") for request in worker.requests)
        assert {request.headers["content-type"] for request in worker.requests} == {"application/json"}


async def test_half_of_a_surrogate_pair_is_the_clients_fault_and_whole_ones_reach_the_worker() -> None:
    async with disagg(prefill=0, make=AnyWorker) as (harness, _, [worker]):
        for half in (r"\ud83d", r"\udc00", r"\ud83d\ud83d", r"a\ud83d\\ud83d"):
            body = json.dumps(SOMETHING).replace('"hi"', f'"hi {half} and more text"').encode()
            statuses = await everywhere(harness, body)
            assert set(statuses.values()) == {400}, statuses
            assert "surrogate" in (await harness.post(CHAT, body)).error["message"]
        assert worker.requests == []
        body = json.dumps(SOMETHING).replace('"hi"', r'"\ud83d\ude00 \\ud83d"').encode()
        assert (await harness.post(CHAT, body)).status == 200
        assert worker.requests[0].body == body


# --- Pages of other origins: who may read answers, and who is asked before


APP, OTHER = "https://app.example.com", "https://evil.example.net"
KEY = "pd-" + "k" * 40
ALLOWED = "access-control-allow-origin"


async def preflight(
    harness: Harness, path: str, origin: str, wanted: str = "authorization"
) -> dict[str, str]:
    connection = await harness.connect()
    asked = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": wanted,
    }
    await connection.send(path, b"", asked, method="OPTIONS")
    response = await connection.response()
    return {**response.headers, "status": str(response.status)}


@pytest.mark.parametrize("path", [CHAT, "/v1/models"])
async def test_a_page_of_an_allowed_origin_asks_first_and_then_reads_answers_and_others_are_told_nothing(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_API_KEYS", f"acme={KEY}")
    async with disagg(access=Access(cors_origins=(APP,))) as (harness, _, _):
        said = await preflight(harness, path, APP)
        assert (said["status"], said[ALLOWED]) == ("200", APP)
        assert said["access-control-allow-headers"] == "authorization"
        said = await preflight(harness, path, OTHER)
        assert said["status"] in ("401", "405")
        assert ALLOWED not in said
        ours = {"authorization": f"Bearer {KEY}"}
        for headers, status, allowed in (
            ({"origin": APP, **ours}, 200, APP),
            ({"origin": APP}, 401, APP),  # the page learns why
            ({"origin": OTHER, **ours}, 200, None),
            (ours, 200, None),
        ):
            answer = await (harness.chat(headers) if path == CHAT else harness.get(path, headers))
            assert (answer.status, answer.headers.get(ALLOWED)) == (status, allowed)
            assert allowed is None or answer.headers["vary"] == "origin"
    async with disagg(access=Access(cors_origins=("*",))) as (harness, _, _):
        assert (await preflight(harness, path, OTHER))[ALLOWED] == "*"
        said = await preflight(harness, path, OTHER, wanted="a:b")
        assert "access-control-allow-headers" not in said, "headers are not repeated blindly"
