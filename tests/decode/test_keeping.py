"""Conversations that the pool is to keep: after their answer, renewed, ended; against a scripted pool."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from pdserve.decode import keeping
from pdserve.decode.keeping import Keeping
from pdserve.decode.settle import WriteBack
from pdserve.engine.commits import Commits
from pdserve.engine.http.request import HttpRequest, RequestTracking
from pdserve.engine.http.timing import WorkerMetrics
from pdserve.engine.page_names import PageNames
from pdserve.engine.sglang.tokenizer_manager import SglangRequest
from pdserve.errors import PoolTimeout
from pdserve.prefill.missed_pages import MissedPages

NAMES = PageNames(4, [b""])


@dataclass
class State:
    output_ids: list[int]
    finished: bool = True


class Pool:
    """Has every page, and notes what it is to keep."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, float]] = []
        self.let_go: list[list[bytes]] = []
        self.fails = False

    async def wait(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        return [True] * len(keys)

    async def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [True] * len(keys)

    async def demote(self, keys: Sequence[bytes]) -> int:
        self.let_go.append(list(keys))
        return len(keys)

    async def keep(self, keys: Sequence[bytes], keep_s: float) -> int:
        if self.fails:
            raise PoolTimeout("late")
        self.kept.append((len(keys), keep_s))
        return len(keys)


def request(name: str, tokens: int, keep_s: int) -> HttpRequest:
    made = HttpRequest(name, "/generate", keep_s=keep_s)
    made.requests["r"] = SglangRequest("r", State([1, 2]), list(range(tokens)))
    made.answered.set()
    return made


async def followed(pool: Any, *requests: HttpRequest) -> Keeping:
    keeper = Keeping(pool)
    missed = MissedPages(pool, WorkerMetrics())
    write_back = WriteBack(Commits(pool, 5.0), missed, names=NAMES, timeout_s=5.0, limit=9, keeping=keeper)
    for one in requests:
        write_back.follow(one)
        await write_back.settled(one.request_id, 5.0)
    await asyncio.gather(*keeper._tasks)
    return keeper


def asked(keeper: Keeping, **wish: Any) -> tuple[int, Any]:
    app = FastAPI()
    app.include_router(keeper.router())
    answer = TestClient(app).post("/pd/keep", content=json.dumps(wish))
    return answer.status_code, answer.json()


async def test_the_pages_of_prompt_and_answer_are_kept_where_the_request_says_so() -> None:
    pool = Pool()
    await followed(pool, request("a", 15, 60), request("b", 15, 0))
    assert pool.kept == [(4, 60)]  # 15 and 1 of 2 tokens: four pages of 4


async def test_a_conversation_can_be_kept_longer_and_no_longer() -> None:
    pool = Pool()
    keeper = await followed(pool, request("a", 15, 60))
    assert asked(keeper, request_id="a", keep_s=300) == (200, {"known": True, "parts": 4})
    assert asked(keeper, request_id="a", keep_s=0) == (200, {"known": True, "parts": 4})
    assert pool.kept[1:] == [(4, 300), (4, -1)]
    assert asked(keeper, request_id="a", keep_s=0) == (200, {"known": False, "parts": 0})


async def test_the_last_request_of_a_conversation_lets_go_what_no_other_may_begin_with() -> None:
    pool = Pool()
    whole = request("a", 15, 60)
    await followed(pool, whole)
    last = request("b", 15, 60)
    last.shared_tokens = 9
    keeper = await followed(pool, last)
    assert pool.kept == [(4, 60), (2, -1)]  # four pages of 4, the first two of which are shared
    [gone] = pool.let_go
    assert gone == (await NAMES.of_conversations(request("c", 15, 0))).all_keys()[2:]
    assert asked(keeper, request_id="b", keep_s=5) == (200, {"known": False, "parts": 0})


async def test_a_pool_that_fails_costs_nothing() -> None:
    pool = Pool()
    pool.fails = True
    keeper = await followed(pool, request("a", 15, 60))
    assert asked(keeper, request_id="a", keep_s=5) == (200, {"known": True, "parts": 0})


async def test_only_the_newest_conversations_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "MAX_CONVERSATIONS", 2)
    keeper = await followed(Pool(), *(request(name, 15, 60) for name in "abc"))
    assert [asked(keeper, request_id=name, keep_s=5)[1]["known"] for name in "abc"] == [False, True, True]


@pytest.mark.parametrize(
    "wish",
    [
        {},
        {"request_id": "a", "keep_s": -1},
        {"request_id": "a", "keep_s": 1e9},
        {"request_id": 5, "keep_s": 1},
    ],
)
async def test_a_wish_that_is_none_is_refused(wish: dict[str, Any]) -> None:
    assert asked(Keeping(Pool()), **wish)[0] == 400  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("header", "seconds"), [(b"60", 60), (b"", 0), (b"-5", 0), (b"9999999", 0), (b"1e3", 0), (b"\xb2", 0)]
)
async def test_the_header_is_read_and_nonsense_passed_over(header: bytes, seconds: int) -> None:
    started: list[HttpRequest] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Any) -> None:
        pass

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "path": "/generate", "method": "POST", "headers": [(b"x-pdserve-keep", header)]}
    await RequestTracking(app, started.append)(scope, receive, send)
    assert [one.keep_s for one in started] == [seconds]
