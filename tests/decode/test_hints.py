"""Hints about prompts: what the pool and SGLang are asked for, against scripted ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from fastapi import Request

from pdserve.decode import hints as module
from pdserve.decode.hints import Hints
from pdserve.decode.lookup import Lookup
from pdserve.engine.http import request_context
from pdserve.engine.page_names import PageNames
from pdserve.pages import namespace_seed, page_hashes, pool_key
from tests.support.engine.asked_prompts import MEMORY, PAGE, PROMPT, SSD, SUFFIXES, Engine, Pool

TENANT = "tenant/alice"


class Tiers(Pool):
    """A pool that brings pages up when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.demoted: list[bytes] = []

    async def raise_pages(self, keys: Sequence[bytes], timeout_s: float) -> int:
        self.there |= dict.fromkeys(keys, MEMORY)
        return len(keys)

    async def demote(self, keys: Sequence[bytes]) -> int:
        self.demoted += keys
        return sum(key in self.there for key in keys)


class Worker:
    """The routes over a scripted pool and SGLang."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dp_size: int = 1) -> None:
        self.pool = Tiers()
        self.fetched: list[tuple[list[int], str | None]] = []
        self.may_end = asyncio.Event()
        self.may_end.set()
        engine = Engine()
        engine.server_args.dp_size = dp_size
        names = PageNames(PAGE, SUFFIXES)
        lookup = Lookup(engine, self.pool, names=names)  # type: ignore[arg-type]
        self.hints = Hints(engine, self.pool, lookup, names=names)  # type: ignore[arg-type]

        async def fetch(_manager: Any, tokens: list[int], like: Any) -> None:
            self.fetched.append((tokens, like.cache_salt))
            await self.may_end.wait()

        monkeypatch.setattr(module, "fetch_pages", fetch)

    async def post(self, path: str, body: Any, salt: str | None = None) -> tuple[int, dict[str, Any]]:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": json.dumps(body).encode()}

        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
        token = request_context._salt.set(salt)
        try:
            route = self.hints.prefetch if path == module.PREFETCH else self.hints.demote
            answer = await route(Request(scope, receive))
        finally:
            request_context._salt.reset(token)
        return answer.status_code, json.loads(bytes(answer.body))


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    return Worker(monkeypatch)


async def test_sglang_fetches_the_prefix_that_the_pool_has(worker: Worker) -> None:
    worker.pool.has(MEMORY, SSD, SSD, salt=TENANT)
    status, said = await worker.post(module.PREFETCH, {"input_ids": PROMPT}, TENANT)
    assert status == 200
    assert said == {"prompt_tokens": 18, "tokens": 12, "prefetched_tokens": 12}
    assert worker.fetched == [(PROMPT[:13], TENANT)], "the last token is never looked up"


async def test_nothing_is_fetched_where_there_is_nothing_or_no_one_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for dp_size, pages in ((1, 0), (2, 3)):
        worker = Worker(monkeypatch, dp_size)
        worker.pool.has(*[MEMORY] * pages)
        _, said = await worker.post(module.PREFETCH, {"input_ids": PROMPT})
        assert (said["tokens"], said["prefetched_tokens"]) == (PAGE * pages, 0)
        assert worker.fetched == []


async def test_pages_come_up_to_memory_of_the_pool_alone(worker: Worker) -> None:
    worker.pool.has(MEMORY, SSD)
    _, said = await worker.post(module.PREFETCH, {"input_ids": PROMPT, "to": "pool"})
    assert said == {"prompt_tokens": 18, "tokens": 8, "prefetched_tokens": 8}
    assert set(worker.pool.there.values()) == {MEMORY}
    assert worker.fetched == []


async def test_a_worker_fetches_for_a_few_at_a_time(worker: Worker) -> None:
    worker.pool.has(MEMORY)
    worker.may_end.clear()
    body = {"input_ids": PROMPT}
    first = [asyncio.create_task(worker.post(module.PREFETCH, body)) for _ in range(module.MAX_AT_ONCE)]
    while len(worker.fetched) < module.MAX_AT_ONCE:  # noqa: ASYNC110  the tasks are on their way
        await asyncio.sleep(0)
    first[0].cancel()  # its client hangs up: SGLang fetches all the same
    status, said = await worker.post(module.PREFETCH, body)
    assert (status, said["error"]["type"]) == (429, "rate_limit_error")
    worker.may_end.set()
    await asyncio.gather(*first, return_exceptions=True)
    assert (await worker.post(module.PREFETCH, body))[0] == 200


async def test_a_conversation_is_demoted_under_its_own_salt(worker: Worker) -> None:
    worker.pool.has(MEMORY, SSD, salt=TENANT)
    _, said = await worker.post(module.DEMOTE, {"input_ids": PROMPT}, TENANT)
    assert said == {"prompt_tokens": 18, "parts": 2 * len(SUFFIXES)}
    pages = page_hashes(PROMPT, PAGE, namespace_seed(None, TENANT))
    assert sorted(worker.pool.demoted) == sorted(
        pool_key(page, suffix) for page in pages for suffix in SUFFIXES
    )


@pytest.mark.parametrize(
    "body", [{}, {"input_ids": PROMPT, "prompt": "1 2"}, {"input_ids": PROMPT, "to": "moon"}, 7]
)
async def test_what_is_no_hint_is_refused(worker: Worker, body: Any) -> None:
    assert (await worker.post(module.PREFETCH, body))[0] == 400
    assert worker.fetched == []
