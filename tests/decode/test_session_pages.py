"""All pages of a session are known at its worker, or it says from which turn on: and they are erased."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.decode import session_pages
from pdserve.decode.erase import IDLE_S, Erase
from pdserve.decode.session_pages import SessionPages
from pdserve.decode.settle import WriteBack
from pdserve.engine.commits import Commits
from pdserve.engine.http.request import HttpRequest
from pdserve.engine.http.timing import WorkerMetrics
from pdserve.engine.page_names import PageNames
from pdserve.engine.sglang.tokenizer_manager import SglangRequest
from pdserve.errors import PoolError, PoolUnavailable
from pdserve.pages import page_hashes, pool_key
from pdserve.prefill.missed_pages import MissedPages
from tests.support.engine.manager import Client, State, scope_of, serve
from tests.support.engine.pool import PAGE, Pool, answered, post
from tests.support.virtual_time import virtually

NAMES = PageNames(PAGE, [b"-0", b"-1"])


class Erasing(Pool):
    def __init__(self) -> None:
        super().__init__()
        self.erased: set[bytes] = set()
        self.away: dict[str, int | PoolError] = {}

    async def erase(self, keys: list[bytes], tenant: str = "") -> dict[str, int | PoolError]:
        self.erased |= set(keys)
        return {"n0": len(keys), **self.away}


class Worker:
    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self.pool, self.sessions = Erasing(), SessionPages(NAMES, max_bytes)
        missed, commits = MissedPages(self.pool, WorkerMetrics()), Commits(self.pool, 5.0)  # type: ignore[arg-type]
        self.follows = WriteBack(commits, missed, names=NAMES, timeout_s=5.0, sessions=self.sessions)
        caches: Any = SimpleNamespace(flush=lambda timeout_s: asyncio.sleep(0, ""))
        self.route = Erase(caches, self.pool, None, self.sessions)  # type: ignore[arg-type]

    async def turn(self, number: int, *, session: str = "s", output: Any = (1, 2), **more: Any) -> None:
        request = answered(
            f"r{random.random()}", more.pop("prompt"), output, session=session, turn=number, **more
        )
        self.follows.follow(request)
        await self.follows.settled(request.request_id, 0.0)

    async def erase(self, session: str = "s") -> dict[str, Any]:
        status, told = await post(self.route.erase, {"session": session})
        assert status == 200
        return told


def keys_of(tokens: list[int]) -> set[bytes]:
    return {pool_key(page, suffix) for page in page_hashes(tokens, PAGE) for suffix in NAMES.rank_suffixes}


@pytest.mark.parametrize("seed", range(3))
def test_all_pages_of_a_sessions_turns_are_erased_and_no_others(seed: int) -> None:
    rng = random.Random(seed)

    @virtually
    async def run() -> None:
        worker, wanted, others = Worker(), set[bytes](), set[bytes]()
        begun = [[rng.randrange(9) for _ in range(rng.randrange(40))] for _ in range(3)]
        for number in range(1, 12):
            before = rng.choice(begun)
            prompt = before[: rng.randrange(len(before) + 1)] + [
                rng.randrange(9) for _ in range(rng.randrange(30))
            ]
            output = [rng.randrange(9) for _ in range(rng.randrange(1, 12))]
            is_ours = rng.random() < 0.7
            await worker.turn(number, session="s" if is_ours else "other", prompt=prompt, output=output)
            begun.append([*prompt, *output])
            (wanted if is_ours else others).update(keys_of([*prompt, *output[:-1]]))
        await worker.erase()
        assert worker.pool.erased == wanted
        await worker.erase("other")
        assert worker.pool.erased == wanted | others
        await worker.follows.close()

    run()


@virtually
async def test_recorded_tokens_of_answers_and_pages_of_prefills_go_too() -> None:
    worker, tokens = Worker(), list(range(8))
    record = b"r" * 32
    await worker.turn(2, prompt=tokens, record_keys=[record])
    prefill = answered("p", [*tokens, *tokens], session="s", turn=3)
    prefill.path = "/pd/prefill"
    worker.follows.follow(prefill)
    told = await worker.erase()
    assert worker.pool.erased == {record, *keys_of([*tokens, 1]), *keys_of([*tokens, *tokens])}
    assert told == {"pages": {"n0": 9}, "problems": {}, "turn": 2}
    await worker.follows.close()


def aborted() -> HttpRequest:
    """SGLang does not say its last of it."""
    made = answered("a", range(8), session="s", turn=2)
    made.requests["r"] = SglangRequest("r", State(True, False), list(range(8)))
    return made


def with_media() -> HttpRequest:
    """The scheduler alone names its pages."""
    made = answered("a", range(8), session="s", turn=2)
    made.requests["r"] = SglangRequest("r", State(True, True), None)
    return made


@pytest.mark.parametrize("unnamed", [aborted, with_media])
def test_a_session_with_pages_that_have_no_name_is_not_said_to_be_known(unnamed: Any) -> None:
    @virtually
    async def run() -> None:
        worker = Worker()
        await worker.turn(1, prompt=list(range(8)))
        worker.follows.follow(unnamed())
        assert (await worker.erase())["turn"] == 0
        await worker.follows.close()

    run()


@virtually
async def test_a_request_that_runs_is_waited_for_and_told_where_it_does_not_end() -> None:
    worker = Worker()
    await worker.turn(1, prompt=list(range(8)))
    running = HttpRequest("late", "/generate", session="s", turn=2)
    worker.follows.follow(running)
    asking = asyncio.create_task(worker.erase())
    await asyncio.sleep(IDLE_S / 2)
    assert not asking.done()
    assert "session" in (await asking)["problems"]
    running.requests["r"] = SglangRequest("r", State(True, True), list(range(50, 60)))
    running.answered.set()
    assert (await worker.erase())["problems"] == {}
    assert keys_of(list(range(50, 60))) <= worker.pool.erased
    await worker.follows.close()


@virtually
async def test_a_session_that_was_forgotten_is_known_from_a_later_turn_on() -> None:
    worker = Worker(max_bytes=32 * 5)
    await worker.turn(1, prompt=list(range(12)))
    assert (await worker.erase())["turn"] == 1
    await worker.turn(1, session="b", prompt=list(range(50, 62)))
    assert [(await worker.erase(name))["turn"] for name in "bs"] == [1, 0]
    await worker.turn(4, prompt=list(range(12)))
    assert (await worker.erase())["turn"] == 4
    await worker.follows.close()


@virtually
async def test_sessions_without_a_whole_page_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_pages, "MAX_SESSIONS", 2)
    worker = Worker()
    for name in "abc":
        await worker.turn(1, session=name, prompt=[1])
    assert [(await worker.erase(name))["turn"] for name in "abc"] == [0, 1, 1]
    await worker.follows.close()


@virtually
async def test_a_node_that_is_away_is_a_problem_and_a_repeated_request_finds_the_pages_again() -> None:
    worker = Worker()
    await worker.turn(1, prompt=list(range(8)))
    worker.pool.away = {"n1": PoolUnavailable("pool node n1 is away")}
    assert (await worker.erase())["problems"] == {"n1": "pool node n1 is away"}
    worker.pool.away = {}
    assert await worker.erase() == {"pages": {"n0": 4}, "problems": {}, "turn": 1}
    await worker.follows.close()


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"ab12 3", ("ab12", 3)),
        (b"ab12", ("", 0)),
        (b"ab12 0", ("", 0)),
        (b"ab12 x", ("", 0)),
        (b"", ("", 0)),
    ],
)
async def test_the_router_names_the_session_and_its_turn(header: bytes, said: tuple[str, int]) -> None:
    started: list[HttpRequest] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    await serve(app, scope_of("/generate", (b"x-pdserve-session", header)), Client(), started.append)
    assert (started[0].session, started[0].turn) == said
