"""Conversations that the pool is to keep, or to let go, after their answer; against a scripted pool."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

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

    async def wait(self, keys: Sequence[bytes], timeout_s: float, tenant: str = "") -> list[bool]:
        return [True] * len(keys)

    async def exists(self, keys: Sequence[bytes], tenant: str = "") -> list[bool]:
        return [True] * len(keys)

    async def demote(self, keys: Sequence[bytes], tenant: str = "") -> int:
        self.let_go.append(list(keys))
        return len(keys)

    async def keep(self, keys: Sequence[bytes], keep_s: float, tenant: str = "") -> int:
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


async def test_the_pages_of_prompt_and_answer_are_kept_where_the_request_says_so() -> None:
    pool = Pool()
    await followed(pool, request("a", 15, 60), request("b", 15, 0))
    assert pool.kept == [(4, 60)]  # 15 and 1 of 2 tokens: four pages of 4


async def test_the_last_request_of_a_conversation_lets_go_what_no_other_may_begin_with() -> None:
    pool = Pool()
    whole = request("a", 15, 60)
    await followed(pool, whole)
    last = request("b", 15, 60)
    last.shared_tokens = 9
    await followed(pool, last)
    assert pool.kept == [(4, 60), (2, -1)]  # four pages of 4, the first two of which are shared
    [gone] = pool.let_go
    assert gone == (await NAMES.of_conversations(request("c", 15, 0))).all_keys()[2:]


async def test_a_pool_that_fails_costs_nothing() -> None:
    pool = Pool()
    pool.fails = True
    await followed(pool, request("a", 15, 60))
    assert pool.kept == []


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
