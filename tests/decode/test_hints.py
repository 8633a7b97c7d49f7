"""Hints about prompts: what the pool and SGLang are asked for, against scripted ones."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdserve.decode import hints as module
from pdserve.decode.hints import Hints
from pdserve.decode.lookup import Lookup
from pdserve.engine.page_names import PageNames
from pdserve.kvpool.protocol.messages import MAX_KEEP_S
from pdserve.pages import namespace_seed, page_hashes, pool_key
from tests.support.engine.pool import MEMORY, PAGE, PROMPT, SSD, SUFFIXES, Engine, Pool, post

TENANT = "tenant/alice"


class Worker:
    """The route over a scripted pool and SGLang."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dp_size: int = 1) -> None:
        self.pool: Any = Pool()
        self.fetched: list[tuple[list[int], str | None]] = []
        self.may_end = asyncio.Event()
        self.may_end.set()
        engine, names = Engine(dp_size), PageNames(PAGE, SUFFIXES)
        self.hints = Hints(engine, self.pool, Lookup(engine, self.pool, names=names), names=names)

        async def fetch(_manager: Any, tokens: list[int], like: Any) -> None:
            self.fetched.append((tokens, like.cache_salt))
            await self.may_end.wait()

        monkeypatch.setattr(module, "fetch_pages", fetch)

    async def post(self, body: Any, salt: str | None = None) -> tuple[int, dict[str, Any]]:
        return await post(self.hints.answer, body, salt)

    async def hint(self, kind: str, salt: str | None = None, **payload: Any) -> dict[str, Any]:
        """What became of one action; without what has no value."""
        status, said = await self.post(asks(kind, **payload), salt)
        assert (status, said["message_id"], said["prompt_tokens"]) == (200, "m", len(PROMPT))
        [result] = said["results"]
        assert result.pop("action_id") == "a0"
        return {name: value for name, value in result.items() if value is not None}


def asks(*kinds: str, **payload: Any) -> dict[str, Any]:
    actions = [
        {"action_id": f"a{number}", "action_type": kind, "action_version": "1.0", "payload": payload}
        for number, kind in enumerate(kinds)
    ]
    envelope = {"protocol_version": "1.0", "message_id": "m", "actions": actions}
    return {"input_ids": PROMPT, "kv_hints": envelope}


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    return Worker(monkeypatch)


async def test_sglang_fetches_the_prefix_that_the_pool_has(worker: Worker) -> None:
    worker.pool.has(MEMORY, SSD, SSD, salt=TENANT)
    assert await worker.hint("prefetch", TENANT) == {"status": "done", "prefetched_tokens": 12}
    assert worker.fetched == [(PROMPT[:13], TENANT)], "the last token is never looked up"


async def test_nothing_is_fetched_where_there_is_nothing_or_no_one_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for dp_size, pages in ((1, 0), (2, 3)):
        worker = Worker(monkeypatch, dp_size)
        worker.pool.has(*[MEMORY] * pages)
        assert (await worker.hint("kv.prefetch"))["prefetched_tokens"] == 0
        assert worker.fetched == []


async def test_pages_come_up_to_memory_of_the_pool_alone(worker: Worker) -> None:
    worker.pool.has(MEMORY, SSD)
    assert (await worker.hint("prefetch", to="pool"))["prefetched_tokens"] == 8
    assert set(worker.pool.there.values()) == {MEMORY}
    assert worker.fetched == []


async def test_a_worker_fetches_for_a_few_at_a_time(worker: Worker) -> None:
    worker.pool.has(MEMORY)
    worker.may_end.clear()
    first = [asyncio.create_task(worker.hint("prefetch")) for _ in range(module.MAX_AT_ONCE)]
    while len(worker.fetched) < module.MAX_AT_ONCE:  # noqa: ASYNC110  the tasks are on their way
        await asyncio.sleep(0)
    first[0].cancel()  # its client hangs up: SGLang fetches all the same
    assert await worker.hint("prefetch") == {"status": "busy"}
    worker.may_end.set()
    await asyncio.gather(*first, return_exceptions=True)
    assert (await worker.hint("prefetch"))["status"] == "done"


async def test_a_conversation_is_demoted_under_its_own_salt(worker: Worker) -> None:
    worker.pool.has(MEMORY, SSD, salt=TENANT)
    assert await worker.hint("demote", TENANT) == {"status": "done", "parts": 2 * len(SUFFIXES)}
    pages = page_hashes(PROMPT, PAGE, namespace_seed(None, TENANT))
    assert sorted(worker.pool.demoted) == sorted(
        pool_key(page, suffix) for page in pages for suffix in SUFFIXES
    )


async def test_pages_are_kept_for_so_long_or_no_longer(worker: Worker) -> None:
    parts = len(PROMPT) // PAGE * len(SUFFIXES)
    assert await worker.hint("retain", ttl_s=60) == {"status": "done", "parts": parts}
    await worker.hint("retain", ttl_s=0)
    await worker.hint("pin")
    assert worker.pool.kept == [(parts, 60), (parts, -1), (parts, MAX_KEEP_S)]
    worker.pool.fails = True
    assert await worker.hint("retain", ttl_s=60) == {"status": "failed"}


async def test_each_action_has_its_own_answer(worker: Worker) -> None:
    body = asks("retain", "share", "demote", "prefetch", to="moon")
    body["kv_hints"]["actions"][2]["action_version"] = "2.0"
    _, said = await worker.post(body)
    got = [(one["action_id"], one["status"]) for one in said["results"]]
    assert got == [("a0", "invalid"), ("a1", "unsupported"), ("a2", "unsupported"), ("a3", "invalid")]


@pytest.mark.parametrize(
    "body",
    [
        {},
        7,
        {"input_ids": PROMPT},
        {**asks("demote"), "prompt": "1 2"},
        {**asks("demote"), "input_ids": None},
        {"input_ids": PROMPT, "kv_hints": {"message_id": "m"}},
        asks(*["demote"] * (module.MAX_ACTIONS + 1)),
    ],
)
async def test_what_is_no_hint_is_refused(worker: Worker, body: Any) -> None:
    assert (await worker.post(body))[0] == 400
    assert worker.pool.demoted == []
