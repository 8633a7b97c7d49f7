"""Following requests until their pages are committed, and what becomes of these; over a scripted pool."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdserve.decode.keeping import Keeping
from pdserve.decode.settle import Settlement, WriteBack
from pdserve.engine.commits import MOMENT_S, Commits
from pdserve.engine.http.request import HttpRequest
from pdserve.engine.http.timing import WorkerMetrics
from pdserve.engine.page_names import PageNames
from pdserve.prefill.missed_pages import MissedPages
from tests.support.engine.manager import Client, scope_of, serve
from tests.support.engine.pool import PAGE, Pool, answered
from tests.support.virtual_time import virtually

NAMES, TIMEOUT_S = PageNames(PAGE, [b""]), 5.0
EIGHT = list(range(8))  # two pages


def make(pool: Any, limit: int = 10, keeping: Keeping | None = None) -> WriteBack:
    missed = MissedPages(pool, WorkerMetrics())
    commits = Commits(pool, TIMEOUT_S)
    return WriteBack(commits, missed, names=NAMES, timeout_s=TIMEOUT_S, limit=limit, keeping=keeping)


def pages(said: Settlement) -> tuple[bool, bool, int, int]:
    return said.known, said.settled, said.committed_pages, said.missing_pages


async def keys_of(request: HttpRequest) -> list[bytes]:
    return (await NAMES.of_conversations(request)).all_keys()


@virtually
async def test_settled_waits_for_the_commit_of_prompt_and_output_pages() -> None:
    pool = Pool()
    write_back = make(pool)
    # 6 prompt tokens and 3 of 4 output tokens are cached: 9 tokens, two full pages of 4
    request = answered("a", range(6), [10, 11, 12, 13])
    keys = await keys_of(request)
    write_back.follow(request)
    assert pages(await write_back.settled("a", 1.0)) == (True, False, 0, 2)
    await pool.commit(keys)
    assert pages(await write_back.settled("a", 5.0)) == (True, True, 2, 0)
    assert pool.waits == [(keys[-1:], TIMEOUT_S)], "the last page: the others are stored before it"
    assert request.requests == {}, "thousands are remembered: nothing of SGLang's is held"
    assert pages(await write_back.settled("a", 0.0)) == (True, True, 2, 0)
    await write_back.close()


@virtually
async def test_settled_waits_for_what_is_stored_beside_the_pages() -> None:
    """The next turn's prefill worker looks for the tokens of the answer."""
    request = answered("a", range(6), [10, 11, 12, 13])
    write_back = make(Pool(await keys_of(request)))
    storing: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    request.side_writes.append(storing)
    write_back.follow(request)
    assert not (await write_back.settled("a", 1.0)).settled
    storing.set_result(True)
    assert (await write_back.settled("a", 5.0)).settled
    await write_back.close()


def prefill() -> HttpRequest:
    """It waits for its pages and counts what it misses itself; an elastic worker serves it as well."""
    made = answered("a", EIGHT)
    made.path = "/pd/prefill"
    return made


def cut_short() -> HttpRequest:
    made = answered("a", EIGHT, [1])
    made.is_cut_short = True
    return made


@pytest.mark.parametrize(
    ("request_of", "said", "within_s"),
    [
        (lambda: HttpRequest("a", "/generate"), (True, False, 0, 0), 60.0),  # still being answered
        (lambda: answered("another", EIGHT), (False, False, 0, 0), 0.0),
        (lambda: answered("a", [1, 2], [3]), (True, True, 0, 0), 0.0),  # without a full page
        (cut_short, (True, False, 0, 2), 0.0),  # how much of it SGLang keeps is not known
        (prefill, (False, False, 0, 0), 0.0),
        (lambda: answered("a", EIGHT), (True, False, 0, 2), TIMEOUT_S),
    ],
)
def test_a_question_is_open_as_long_as_pages_may_come(
    request_of: Any, said: tuple[bool, bool, int, int], within_s: float
) -> None:
    @virtually
    async def run() -> None:
        write_back = make(Pool())
        write_back.follow(request_of())
        begun_s = asyncio.get_running_loop().time()
        assert pages(await write_back.settled("a", 60.0)) == said
        assert asyncio.get_running_loop().time() - begun_s == pytest.approx(within_s)
        await write_back.close()

    run()


@virtually
async def test_the_oldest_request_is_forgotten_at_the_limit() -> None:
    write_back = make(Pool(), limit=2)
    for name in "abc":
        write_back.follow(answered(name, EIGHT, [1]))
    assert write_back.unsettled() == 2
    assert [(await write_back.settled(name, 0.01)).known for name in "abc"] == [False, True, True]
    await write_back.close()
    assert write_back.unsettled() == 0


@virtually
async def test_pages_that_never_come_are_waited_for_once_and_then_a_moment_until_some_come() -> None:
    pool, loop = Pool(), asyncio.get_running_loop()
    write_back = make(pool)
    waited_s = []
    for number in range(4):
        request = answered(str(number), [number, *range(7)], [1])
        keys = await keys_of(request)
        write_back.follow(request)
        begun_s = loop.time()
        await write_back.settled(request.request_id, 60.0)
        waited_s.append(loop.time() - begun_s)
        if number == 2:
            await pool.commit(keys)
        await asyncio.sleep(60.0)
    assert waited_s == [TIMEOUT_S, MOMENT_S, MOMENT_S, TIMEOUT_S]


@virtually
async def test_of_two_requests_with_one_id_the_later_is_followed() -> None:
    later = answered("a", EIGHT, [1])
    write_back = make(Pool(await keys_of(later)))
    write_back.follow(HttpRequest("a", "/generate"))
    earlier = asyncio.create_task(write_back.settled("a", 60.0))
    await asyncio.sleep(0)
    write_back.follow(later)
    assert not (await earlier).settled
    assert (await write_back.settled("a", 5.0)).committed_pages == 2


@pytest.mark.parametrize(
    ("asked", "fails", "kept", "let_go"),
    [
        ({"keep_s": 60}, False, [(4, 60)], 0),  # 15 and 1 of 2 tokens: four pages of 4
        ({"keep_s": 0}, False, [], 0),
        ({"keep_s": 60, "shared_tokens": 9}, False, [(2, -1)], 2),  # others may begin with two
        ({"keep_s": 60}, True, [], 0),
    ],
)
async def test_pages_of_prompt_and_answer_are_kept_or_let_go_as_the_request_says(
    asked: dict[str, int], fails: bool, kept: list[tuple[int, float]], let_go: int
) -> None:
    others = asyncio.all_tasks()
    request = answered("a", range(15), [1, 2], **asked)
    keys = await keys_of(request)
    pool: Any = Pool(keys)
    pool.fails = fails
    keeping = Keeping(pool)
    write_back = make(pool, keeping=keeping)
    write_back.follow(request)
    await write_back.settled("a", 5.0)
    await asyncio.gather(*asyncio.all_tasks() - others)
    assert pool.kept == kept
    assert pool.demoted == keys[len(keys) - let_go :]


@pytest.mark.parametrize(
    ("header", "seconds"), [(b"60", 60), (b"", 0), (b"-5", 0), (b"9999999", 0), (b"1e3", 0), (b"\xb2", 0)]
)
async def test_the_header_is_read_and_nonsense_passed_over(header: bytes, seconds: int) -> None:
    started: list[HttpRequest] = []

    async def app(_scope: Any, _receive: Any, _send: Any) -> None: ...

    await serve(app, scope_of("/generate", (b"x-pdserve-keep", header)), Client(), started.append)
    assert [one.keep_s for one in started] == [seconds]
