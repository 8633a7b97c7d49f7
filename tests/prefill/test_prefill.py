"""How long a prefill waits for its pages, and why they were computed; over a scripted pool and SGLang."""

from __future__ import annotations

import asyncio
import contextvars
import json
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.engine.commits import MOMENT_S, Commits
from pdserve.engine.http.cache_report import Found, Reuse
from pdserve.engine.http.request import HttpRequest, current_request
from pdserve.engine.http.request_context import Bootstrap, bootstrap_of_request, set_bootstrap
from pdserve.engine.http.timing import WorkerMetrics
from pdserve.engine.page_names import PageNames, RequestPages
from pdserve.engine.sglang.prompt import Prefilled
from pdserve.engine.sglang.tokenizer_manager import SglangRequest
from pdserve.kvpool.protocol.messages import Fate
from pdserve.pages import page_hashes, pool_key
from pdserve.prefill import routes
from pdserve.prefill.missed_pages import Miss, MissedPages, header_of, miss_of
from tests.support.engine.manager import Client, State, scope_of, serve
from tests.support.engine.pool import PAGE, Pool, answered
from tests.support.virtual_time import run_virtually, virtually

TIMEOUT_S = 10.0
PROMPT = list(range(16))
PAGES = page_hashes(PROMPT, PAGE)
NAMES = PageNames(PAGE, [b""])


def route(pool: Any, *, hands_over: bool = False) -> routes.Prefill:
    engine, metrics = SimpleNamespace(app_state=None, tokenizer_manager=None), WorkerMetrics()
    more: dict[str, Any] = {
        "missed": MissedPages(pool, metrics),
        "metrics": metrics,
        "hands_over": hands_over,
    }
    return routes.Prefill(engine, names=NAMES, commits=Commits(pool, TIMEOUT_S), **more)


def published(
    pool: Pool,
    monkeypatch: pytest.MonkeyPatch,
    cached: int = 0,
    prompt: list[int] | None = PROMPT,
    leaves_s: float | None = None,
    hands_over: bool = False,
) -> tuple[int, int, float]:
    """(published pages, missing ones, seconds) of one /pd/prefill of PROMPT of which SGLang had `cached`
    tokens, and whose client leaves then.
    """

    async def prefill_request(*_: Any, **__: Any) -> None: ...

    async def run_prefill(*_: Any) -> Prefilled:
        request = current_request()
        assert request is not None
        request.requests["r"] = SglangRequest("r", State(True, True), prompt)
        return Prefilled(len(PROMPT), [Found(cached)], {"r": cached})

    monkeypatch.setattr(routes, "prefill_request", prefill_request)
    monkeypatch.setattr(routes, "run_prefill", run_prefill)
    told: list[Any] = []

    async def run() -> None:
        client, loop = Client(), asyncio.get_running_loop()
        begun_s = loop.time()

        async def app(_scope: Any, receive: Any, send: Any) -> None:
            asked: Any = SimpleNamespace(body=lambda: asyncio.sleep(0, b"{}"))
            response = await route(pool, hands_over=hands_over).prefill(asked, "/generate")
            said = json.loads(bytes(response.body))
            told.extend((said["published_pages"], said["missing_pages"], loop.time() - begun_s))

        if leaves_s is not None:
            loop.call_later(leaves_s, client.leave)
        await serve(app, scope_of("/pd/prefill"), client)

    run_virtually(run())
    return told[0], told[1], told[2]


@pytest.mark.parametrize(
    ("committed", "cached", "answer"),
    [
        (PAGES, 0, (4, 0, 0.0)),
        # SGLang has them in its own cache, and stores a page only once: those that the pool lost never come
        (PAGES[2:], 8, (2, 2, 0.0)),
        (PAGES[:3], 0, (3, 1, TIMEOUT_S)),
        # a whole number of pages, of which SGLang never says that it found the last
        ([], len(PROMPT) - PAGE, (0, 4, MOMENT_S)),
    ],
    ids=["all committed", "lost by the pool", "the last one never comes", "found whole and lost"],
)
def test_the_last_page_is_waited_for_where_it_was_computed_here(
    monkeypatch: pytest.MonkeyPatch, committed: list[bytes], cached: int, answer: Any
) -> None:
    pool = Pool(committed)
    assert published(pool, monkeypatch, cached) == pytest.approx(answer)
    assert [keys for keys, _ in pool.waits] == [PAGES[-1:]]
    assert bool(pool.lookups) == (cached > 0 or PAGES[-1] not in committed), "the wait has said the rest"


def test_pages_that_cannot_be_named_are_not_said_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt with an image gets its token ids in the scheduler."""
    pool = Pool()
    assert published(pool, monkeypatch, prompt=None) == (0, 4, 0.0)
    assert pool.waits == []


def test_a_client_that_leaves_ends_the_wait_for_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    assert published(Pool(), monkeypatch, leaves_s=2.0) == (0, 4, 2.0)


@virtually
async def test_when_nothing_arrives_only_the_first_prefill_waits_its_whole_time() -> None:
    pool = Pool()
    prefill = route(pool)
    for round_ in range(4):
        if round_ == 2:
            await pool.commit(PAGES)
        await prefill._published(RequestPages(NAMES, {"r": PAGES}), [])
    assert [timeout_s for _, timeout_s in pool.waits] == [TIMEOUT_S, MOMENT_S, MOMENT_S, TIMEOUT_S]


@virtually
async def test_pages_that_all_come_late_are_waited_for_again() -> None:
    """A busy machine, after a time without a pool: no page comes within a moment, each comes soon after."""
    pool, loop = Pool(), asyncio.get_running_loop()
    prefill = route(pool)
    pages = [page_hashes([number, *PROMPT], PAGE) for number in range(4)]
    published = []
    for number, each in enumerate(pages):
        if number:
            loop.call_later(2.0, lambda each=each: asyncio.ensure_future(pool.commit(each)))  # type: ignore[misc]
        published.append(await prefill._published(RequestPages(NAMES, {"r": each}), []))
        await asyncio.sleep(5.0)
    assert published == [0, 0, 4, 4]


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

    class Noting(Pool):
        async def wait(self, keys: Sequence[bytes], timeout_s: float, tenant: str = "") -> list[bool]:
            rooms.append(bootstrap_of_request())
            return await super().wait(keys, timeout_s, tenant)

    published(Noting(PAGES), monkeypatch, hands_over=hands_over)
    assert rooms[-1] == room


# --- the token behind the prompt


@pytest.mark.parametrize(
    ("digests", "token", "said"),
    [(["d1"], 42, "42xd1"), (["d1"], 0, "0xd1"), (["d1"], None, ""), ([""], 42, ""), ([], 42, "")],
)
def test_the_sampled_token_is_reported_with_what_it_follows_from(
    digests: list[str], token: int | None, said: str
) -> None:
    record = HttpRequest("id", "/pd/prefill")
    for number, digest in enumerate(digests):
        record.requests[str(number)] = SglangRequest(str(number), State(), first_digest=digest)
    assert routes.first_of(record, Prefilled(16, [Found()], {}, token)) == said


# --- why pages were computed


@pytest.mark.parametrize(
    ("fate", "reason", "age_s"),
    [
        (Fate(), "never_stored", None),
        (Fate(1.0), "never_stored", None),  # stored by this very prompt
        (Fate(1.0, "capacity", 30.0), "evicted", 30.0),
        (Fate(None, "slab", 30.0), "evicted", 30.0),
        (Fate(None, "quota", 30.0), "over_quota", 30.0),
        (Fate(None, "ttl", 30.0), "expired", 30.0),
        (Fate(None, "dropped", 30.0), "dropped", 30.0),
        (Fate(None, "a newer node's", 30.0), "unknown", 30.0),
        (Fate(30.0), "not_fetched", 30.0),
        (Fate(30.0, "capacity", 60.0), "not_fetched", 30.0),
        (Fate(None, "capacity", 1.0), "unknown", None),  # was it there when the prompt came?
        (None, "unknown", None),
    ],
)
def test_a_miss_has_the_reason_of_the_time_when_its_prompt_came(
    fate: Fate | None, reason: str, age_s: float | None
) -> None:
    assert miss_of(fate, 64, asked_ago_s=2.0) == Miss(reason, 64, age_s)


def test_the_header_sums_tokens_by_reason_and_tells_the_youngest_age() -> None:
    misses = [Miss("never_stored", 4, None), Miss("evicted", 8, 9.0), Miss("evicted", 8, 3.25)]
    assert header_of(misses) == "evicted=16;age_s=3.2, never_stored=4"
    assert header_of([]) == ""


@pytest.mark.parametrize(
    ("tokens", "cached", "first", "missed"),
    [
        (16, 0, 0, 12),  # SGLang looks for all but the last token: three pages of four
        (17, 0, 0, 16),
        (17, 8, 2, 8),
        (17, 11, 2, 8),  # part of a page, from the device
        (16, 12, None, 0),
        (17, 16, None, 0),
        (3, 0, None, 0),
    ],
)
def test_the_first_page_that_was_not_found_is_asked_about(
    tokens: int, cached: int, first: int | None, missed: int
) -> None:
    pages = RequestPages(NAMES, {"r": PAGES})
    wanted = [] if first is None else [(pool_key(PAGES[first], b""), missed)]
    assert pages.missed({"r": tokens}, {"r": cached}) == wanted


@pytest.mark.parametrize(("told", "counted"), [([], {"evicted": 8}), ([Found(pool=17)], {})])
async def test_misses_are_counted_of_requests_that_were_computed_here_first(
    told: list[Found], counted: dict[str, int]
) -> None:
    """And not of those whose prompt a prefill worker computed."""
    pool, found = Pool(), dict[str, int]()
    pool.fate = Fate(None, "capacity", 1000.0)
    reuse = Reuse(told)
    reuse.begin(1, 1)
    reuse.sent("r")
    reuse.note("r", Found(device=8), 17)
    request = answered("id", range(17), started_s=time.monotonic(), reuse=reuse)
    missed = MissedPages(pool, SimpleNamespace(miss=found.__setitem__))  # type: ignore[arg-type]
    await missed.count(request, RequestPages(NAMES, {"r": page_hashes(range(20), PAGE)}))
    assert (found, len(pool.asked_fates)) == (counted, len(counted))
