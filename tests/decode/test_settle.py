"""Following requests until their pages are committed, against a scripted pool."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from pdserve.decode.settle import WriteBack
from pdserve.engine import commits
from pdserve.engine.commits import Commits
from pdserve.engine.http.request import HttpRequest
from pdserve.engine.http.timing import WorkerMetrics
from pdserve.engine.page_names import PageNames
from pdserve.engine.sglang.tokenizer_manager import SglangRequest
from pdserve.prefill.missed_pages import MissedPages

NAMES = PageNames(4, [b""])


@dataclass
class ScriptedPool:
    """Commits when told to."""

    committed: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[bytes] = field(default_factory=list)

    async def wait(self, keys: Sequence[bytes], timeout_s: float, tenant: str = "") -> list[bool]:
        self.asked = list(keys)
        await self.committed.wait()
        return [True] * len(keys)

    async def exists(self, keys: Sequence[bytes], tenant: str = "") -> list[bool]:
        return [self.committed.is_set()] * len(keys)


@dataclass
class State:
    output_ids: list[int]
    finished: bool = True


def answered_request(request_id: str, prompt: list[int], output: list[int]) -> HttpRequest:
    request = HttpRequest(request_id, "/generate")
    request.requests["r"] = SglangRequest("r", State(output), prompt)
    request.answered.set()
    return request


def make(pool: Any, limit: int = 10) -> WriteBack:
    missed = MissedPages(pool, WorkerMetrics())
    return WriteBack(Commits(pool, 5.0), missed, names=NAMES, timeout_s=5.0, limit=limit)


async def test_settled_waits_for_the_commit_of_prompt_and_output_pages() -> None:
    pool = ScriptedPool()
    write_back = make(pool)
    # 6 prompt tokens and 3 of 4 output tokens are cached: 9 tokens, two full pages of 4
    write_back.follow(answered_request("a", list(range(6)), [10, 11, 12, 13]))
    early = await write_back.settled("a", 0.01)
    assert (early.known, early.settled, early.committed_pages, early.missing_pages) == (True, False, 0, 2)
    pool.committed.set()
    late = await write_back.settled("a", 5.0)
    assert (late.known, late.settled, late.committed_pages, late.missing_pages) == (True, True, 2, 0)
    assert len(pool.asked) == 1  # the last page: the others are stored before it
    await write_back.close()


async def test_settled_waits_for_what_is_stored_beside_the_pages() -> None:
    """The next turn's prefill worker looks for the tokens of the answer."""
    pool, request = ScriptedPool(), answered_request("a", list(range(6)), [10, 11, 12, 13])
    pool.committed.set()
    storing: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    request.side_writes.append(storing)
    write_back = make(pool)
    write_back.follow(request)
    assert not (await write_back.settled("a", 0.01)).settled
    storing.set_result(True)
    assert (await write_back.settled("a", 5.0)).settled
    await write_back.close()


async def test_a_prefill_that_waits_for_its_pages_itself_is_not_followed_a_second_time() -> None:
    """An elastic worker serves `/pd/prefill` as well, which asks the pool and counts what it misses."""
    pool, asked = ScriptedPool(), answered_request("a", list(range(8)), [9])
    pool.committed.set()
    asked.path = "/pd/prefill"
    write_back = make(pool)
    write_back.follow(asked)
    assert not (await write_back.settled("a", 5.0)).known
    assert (pool.asked, write_back.unsettled()) == ([], 0)
    await write_back.close()


async def test_a_request_still_being_answered_is_known_and_not_settled() -> None:
    write_back = make(ScriptedPool())
    write_back.follow(HttpRequest("a", "/generate"))
    settlement = await write_back.settled("a", 0.01)
    assert settlement.known
    assert not settlement.settled
    await write_back.close()


async def test_an_unknown_request_is_answered_at_once() -> None:
    settlement = await make(ScriptedPool()).settled("never", 60.0)
    assert (settlement.known, settlement.settled) == (False, False)


async def test_the_oldest_request_is_forgotten_at_the_limit() -> None:
    write_back = make(ScriptedPool(), limit=2)
    for name in "abc":
        write_back.follow(answered_request(name, list(range(8)), [1]))
    known = [(await write_back.settled(name, 0.01)).known for name in "abc"]
    assert known == [False, True, True]
    await write_back.close()


async def test_a_request_that_was_cut_short_is_not_waited_for() -> None:
    write_back = make(ScriptedPool())
    request = answered_request("a", list(range(8)), [1])
    request.is_cut_short = True
    write_back.follow(request)
    settlement = await write_back.settled("a", 60.0)
    assert (settlement.known, settlement.settled, settlement.missing_pages) == (True, False, 2)


async def test_a_remembered_request_holds_nothing_of_sglangs() -> None:
    pool = ScriptedPool()
    pool.committed.set()
    write_back = make(pool)
    request = answered_request("a", list(range(8)), [1])
    write_back.follow(request)
    assert (await write_back.settled("a", 5.0)).committed_pages == 2
    assert request.requests == {}
    again = await write_back.settled("a", 0.0)
    assert (again.settled, again.committed_pages) == (True, 2)


async def test_a_request_without_full_pages_is_settled_once_answered() -> None:
    write_back = make(ScriptedPool())
    write_back.follow(answered_request("a", [1, 2], [3]))
    settlement = await write_back.settled("a", 5.0)
    assert (settlement.settled, settlement.missing_pages) == (True, 0)


async def test_pages_that_never_come_are_waited_for_once_and_then_no_longer_than_a_moment_until_some_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commits, "MOMENT_S", 0.0)

    class Pool:
        """Each wait ends as it is told."""

        def __init__(self) -> None:
            self.ends = asyncio.Queue[bool]()

        async def wait(self, keys: Sequence[bytes], timeout_s: float, tenant: str = "") -> list[bool]:
            return [await self.ends.get()] * len(keys)

        async def exists(self, keys: Sequence[bytes], tenant: str = "") -> list[bool]:
            return [False] * len(keys)

    pool = Pool()
    write_back = make(pool)

    async def is_waited_for(name: str, comes: bool) -> bool:
        """Whether a question about a request is open until the wait for its pages ends."""
        write_back.follow(answered_request(name, list(range(8)), [1]))
        question = asyncio.create_task(write_back.settled(name, 60.0))
        for _ in range(10):
            await asyncio.sleep(0)
        is_open = not question.done()
        pool.ends.put_nowait(comes)
        await question
        await asyncio.wait({write_back._followed[name].task})
        return is_open

    assert await is_waited_for("a", comes=False)
    assert not await is_waited_for("b", comes=False)
    assert not await is_waited_for("c", comes=True)
    assert await is_waited_for("d", comes=True)


async def test_of_two_requests_with_one_id_the_later_is_followed() -> None:
    pool = ScriptedPool()
    pool.committed.set()
    write_back = make(pool)
    write_back.follow(HttpRequest("a", "/generate"))
    earlier = asyncio.create_task(write_back.settled("a", 60.0))
    await asyncio.sleep(0)
    write_back.follow(answered_request("a", list(range(8)), [1]))
    assert not (await earlier).settled
    assert (await write_back.settled("a", 5.0)).committed_pages == 2
