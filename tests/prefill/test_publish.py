"""How long a prefill waits for its pages, against a scripted pool and SGLang."""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.engine.commits import MOMENT_S, Commits
from pdserve.engine.http.cache_report import Found
from pdserve.engine.http.request import current_request
from pdserve.engine.http.request_context import Bootstrap, bootstrap_of_request, set_bootstrap
from pdserve.engine.http.timing import WorkerMetrics
from pdserve.engine.page_names import PageNames, RequestPages
from pdserve.engine.sglang.prompt import Prefilled
from pdserve.engine.sglang.tokenizer_manager import SglangRequest
from pdserve.kvpool.protocol.messages import Fate
from pdserve.pages import page_hashes
from pdserve.prefill import routes
from pdserve.prefill.missed_pages import MissedPages
from tests.support.engine.manager import Client, State, scope_of, serve

PAGE, TIMEOUT_S, GRACE_S = 4, 60.0, MOMENT_S
PROMPT = list(range(16))
PAGES = page_hashes(PROMPT, PAGE)
NAMES = PageNames(PAGE, [b""])


class Pool:
    """Holds `committed`, and notes each wait with its timeout. A pool that `hangs` answers none."""

    def __init__(self, committed: Sequence[bytes] = (), hangs: bool = False) -> None:
        self.committed = set(committed)
        self.waits: list[tuple[list[bytes], float]] = []
        self.is_cancelled = False
        self.asked = asyncio.Event()
        self._hangs = hangs

    async def wait(self, keys: Sequence[bytes], timeout_s: float, tenant: str = "") -> list[bool]:
        self.waits.append((list(keys), timeout_s))
        self.asked.set()
        if self._hangs:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.is_cancelled = True
                raise
        return await self.exists(keys)

    async def exists(self, keys: Sequence[bytes], tenant: str = "") -> list[bool]:
        return [key in self.committed for key in keys]

    async def fates(self, keys: Sequence[bytes], tenant: str = "") -> list[Fate | None]:
        return [Fate()] * len(keys)


def route(pool: Pool, hands_over: bool = False) -> routes.Prefill:
    engine = SimpleNamespace(app_state=None, tokenizer_manager=None)
    metrics = WorkerMetrics()
    missed: Any = MissedPages(pool, metrics)  # type: ignore[arg-type]
    return routes.Prefill(
        engine,
        names=NAMES,
        commits=Commits(pool, TIMEOUT_S),
        missed=missed,
        metrics=metrics,
        hands_over=hands_over,
    )


def published(
    pool: Pool,
    monkeypatch: pytest.MonkeyPatch,
    cached: int = 0,
    prompt: list[int] | None = PROMPT,
    leaves: bool = False,
    hands_over: bool = False,
) -> tuple[int, int]:
    """(published, missing) pages of one /pd/prefill of PROMPT of which SGLang had `cached` tokens."""

    async def prefill_request(*_: Any, **__: Any) -> None: ...

    async def run_prefill(*_: Any) -> Prefilled:
        request = current_request()
        assert request is not None
        request.requests["r"] = SglangRequest("r", State(True, True), prompt)
        return Prefilled(len(PROMPT), [Found(cached)], {"r": cached})

    monkeypatch.setattr(routes, "prefill_request", prefill_request)
    monkeypatch.setattr(routes, "run_prefill", run_prefill)
    answers: list[dict[str, Any]] = []

    async def run() -> None:
        client = Client()

        async def app(_scope: Any, receive: Any, send: Any) -> None:
            asked: Any = SimpleNamespace(body=lambda: asyncio.sleep(0, b"{}"))
            response = await route(pool, hands_over).prefill(asked, "/generate")
            answers.append(json.loads(bytes(response.body)))

        async with asyncio.TaskGroup() as group:
            group.create_task(serve(app, scope_of("/pd/prefill"), client))
            if leaves:
                await pool.asked.wait()
                client.leave()

    asyncio.run(run())
    return answers[0]["published_pages"], answers[0]["missing_pages"]


@pytest.mark.parametrize(
    ("committed", "cached", "answer", "waits"),
    [
        (PAGES, 0, (4, 0), [(PAGES[-1:], TIMEOUT_S)]),
        # SGLang has them in its own cache, and stores a page only once: those that the pool lost never come
        (PAGES[2:], 8, (2, 2), [(PAGES[-1:], TIMEOUT_S)]),
        # a whole number of pages, of which SGLang never says that it found the last
        ([], len(PROMPT) - PAGE, (0, 4), [(PAGES[-1:], GRACE_S)]),
    ],
    ids=["all committed", "lost by the pool", "found whole and lost"],
)
def test_the_last_page_is_waited_for_where_it_was_computed_here(
    monkeypatch: pytest.MonkeyPatch, committed: list[bytes], cached: int, answer: Any, waits: Any
) -> None:
    pool = Pool(committed)
    assert published(pool, monkeypatch, cached) == answer
    assert pool.waits == waits


def test_pages_that_cannot_be_named_are_not_said_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt with an image gets its token ids in the scheduler."""
    pool = Pool()
    assert published(pool, monkeypatch, prompt=None) == (0, 4)
    assert pool.waits == []


def test_a_client_that_leaves_ends_the_wait_for_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(hangs=True)
    assert published(pool, monkeypatch, leaves=True) == (0, 4)
    assert pool.is_cancelled


def test_when_nothing_arrives_only_the_first_prefill_waits_its_whole_time() -> None:
    async def run() -> list[float]:
        pool = Pool()
        prefill = route(pool)
        for round_ in range(4):
            if round_ == 2:
                pool.committed.update(PAGES)
            await prefill._published(RequestPages(NAMES, {"r": PAGES}), [])
        return [timeout_s for _, timeout_s in pool.waits]

    assert asyncio.run(run()) == [TIMEOUT_S, GRACE_S, GRACE_S, TIMEOUT_S]


def test_a_direct_hand_off_waits_for_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode worker has the prompt's KV when SGLang answers."""
    pool = Pool()
    room = Bootstrap("10.0.0.5", 8998, 7)
    contextvars.copy_context().run(lambda: (set_bootstrap(room), published(pool, monkeypatch)))
    assert pool.waits == []


@pytest.mark.parametrize(("hands_over", "room"), [(True, routes.FOR_THE_POOL), (False, None)])
def test_a_prefill_for_the_pool_is_in_a_room_where_nobody_waits_if_sglang_needs_one(
    monkeypatch: pytest.MonkeyPatch, hands_over: bool, room: Bootstrap | None
) -> None:
    """In its ordinary mode SGLang keeps no page of a request of that room."""
    rooms: list[Bootstrap | None] = []
    pool = Pool(PAGES)
    monkeypatch.setattr(pool, "exists", lambda keys, tenant: noted(rooms, keys))
    published(pool, monkeypatch, hands_over=hands_over)
    assert rooms[-1] == room


async def noted(rooms: list[Bootstrap | None], keys: Sequence[bytes]) -> list[bool]:
    rooms.append(bootstrap_of_request())
    return [True] * len(keys)
