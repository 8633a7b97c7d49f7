"""What a decode worker pulls of a prompt while it is prefilled, against a scripted pool and SGLang."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request
from sglang.srt.managers.io_struct import GenerateReqInput

from pdserve.decode import pull_ahead
from pdserve.engine.page_names import PageNames
from pdserve.engine.sglang.children.fetches import PULL_ID
from pdserve.pages import PagePart, namespace_seed, page_hashes, part_suffix, pool_key
from tests.support.engine.pool import MEMORY, PAGE, SUFFIXES, Pool

STEP = 8
WINDOWS = PagePart("swa", 2, [part_suffix(suffix, "swa", {"kv": 0, "swa": 2}) for suffix in SUFFIXES])
PROMPT = list(range(100, 130))  # 30 tokens: steps end at 8, 16, 24


class PromptPool(Pool):
    """Pages of PROMPT appear when the test says so."""

    async def commit_tokens(self, tokens: int, salt: str | None = None) -> None:
        """The pages of the first so many tokens, on all ranks."""
        pages = page_hashes(PROMPT[:tokens], PAGE, namespace_seed(None, salt))
        await self.commit(pool_key(page, suffix) for page in pages for suffix in SUFFIXES)

    async def commit_windows(self, *pages: int) -> None:
        """The part of these pages that layers with a window have."""
        digests = page_hashes(PROMPT, PAGE, None)
        await self.commit(pool_key(digests[page], s) for page in pages for s in WINDOWS.suffixes)


class Manager:
    """SGLang: notes what it is to fetch, and is done with it when `release` is set."""

    def __init__(self, dp_size: int = 1) -> None:
        self.server_args = SimpleNamespace(dp_size=dp_size)
        self.fetched: list[GenerateReqInput] = []
        self.began = asyncio.Condition()
        self.release = asyncio.Event()
        self.release.set()
        self.done = 0

    async def generate_request(self, asked: GenerateReqInput, _: None) -> AsyncIterator[dict[str, Any]]:
        async with self.began:
            self.fetched.append(asked)
            self.began.notify_all()
        await self.release.wait()
        self.done += 1
        yield {"meta_info": {"finish_reason": {"type": "abort"}}}

    async def _tokenize_texts(self, text: str) -> tuple[list[int], None]:
        return list(map(int, text.split())), None

    async def until(self, fetches: int) -> None:
        async with self.began:
            await self.began.wait_for(lambda: len(self.fetched) >= fetches)

    @property
    def lengths(self) -> list[int]:
        return [len(asked.input_ids) for asked in self.fetched]


class Asked:
    """One `/pd/pull` under way."""

    def __init__(
        self,
        body: dict[str, Any],
        endpoint: str = "/generate",
        dp_size: int = 1,
        parts: Sequence[PagePart] = (),
    ) -> None:
        self.pool = PromptPool()
        self.tokenizer_manager = Manager(dp_size)
        self.app_state = None
        self.turns = None
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._messages.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
        names = PageNames(PAGE, SUFFIXES, parts)
        route = pull_ahead.PullAhead(self, self.pool, names=names, step_tokens=STEP + 1)  # type: ignore[arg-type]
        scope = {"type": "http", "method": "POST", "path": "/pd/pull", "headers": [], "query_string": b""}
        self.answering = asyncio.ensure_future(route.pull(Request(scope, self._messages.get), endpoint))

    def hang_up(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})

    async def answer(self) -> tuple[int, Any]:
        response = await self.answering
        return response.status_code, json.loads(bytes(response.body))


async def first_fetch_held() -> Asked:
    """PROMPT asked for, its first step being fetched until `release` is set."""
    asked = Asked({"input_ids": PROMPT})
    asked.tokenizer_manager.release.clear()
    await asked.pool.commit_tokens(8)
    await asked.tokenizer_manager.until(1)
    return asked


async def test_each_step_is_fetched_as_soon_as_it_is_there() -> None:
    asked = Asked({"input_ids": PROMPT})
    for count, tokens in enumerate((8, 16, 24), 1):
        await asked.pool.commit_tokens(tokens)
        await asked.tokenizer_manager.until(count)
    assert await asked.answer() == (200, {"pulled_tokens": 24})
    assert asked.tokenizer_manager.lengths == [9, 17, 25]  # one more than is looked up
    assert [a.input_ids for a in asked.tokenizer_manager.fetched] == [PROMPT[:n] for n in (9, 17, 25)]
    assert all(str(a.rid).startswith(PULL_ID) for a in asked.tokenizer_manager.fetched)


async def test_steps_that_came_during_a_fetch_are_fetched_together() -> None:
    asked = await first_fetch_held()
    manager = asked.tokenizer_manager
    await asked.pool.commit_tokens(24)
    manager.release.set()
    await asked.answer()
    assert manager.lengths == [9, 25]


async def test_a_step_of_which_a_rank_lacks_its_page_is_not_there() -> None:
    asked = Asked({"input_ids": PROMPT})
    asked.pool.has(*[MEMORY] * 4, suffixes=SUFFIXES[:1], prompt=PROMPT)  # one rank's alone
    await asked.pool.commit_tokens(8)
    await asked.tokenizer_manager.until(1)
    assert asked.tokenizer_manager.lengths == [9]
    asked.hang_up()
    await asked.answer()


async def test_steps_that_cannot_be_restored_are_left_out() -> None:
    """Chunks of the prefill worker end at 8 and at 24 tokens; it stores the window at their end."""
    asked = Asked({"input_ids": PROMPT}, parts=[WINDOWS])
    await asked.pool.commit_windows(0, 1, 4, 5)
    await asked.pool.commit_tokens(8)
    await asked.tokenizer_manager.until(1)
    await asked.pool.commit_tokens(16)
    await asked.pool.commit_tokens(24)
    assert await asked.answer() == (200, {"pulled_tokens": 24})
    assert asked.tokenizer_manager.lengths == [9, 25]


async def test_a_prompt_whose_windows_do_not_come_is_not_pulled_ahead() -> None:
    asked = Asked({"input_ids": PROMPT}, parts=[WINDOWS])
    await asked.pool.commit_windows(1, 3, 5)  # half of each window
    await asked.pool.commit_tokens(24)
    assert await asked.answer() == (200, {"pulled_tokens": 0})
    assert asked.tokenizer_manager.fetched == []


async def test_nothing_is_begun_after_the_router_hung_up_and_what_was_begun_goes_on() -> None:
    asked = await first_fetch_held()
    manager = asked.tokenizer_manager
    asked.hang_up()
    assert await asked.answer() == (200, {"pulled_tokens": None})
    await asked.pool.commit_tokens(24)
    manager.release.set()
    while not manager.done:  # noqa: ASYNC110  nobody waits for it any more
        await asyncio.sleep(0)
    assert manager.lengths == [9]


async def test_pages_are_those_of_the_requests_salt() -> None:
    asked = Asked({"text": " ".join(map(str, PROMPT)), "cache_salt": "mine"})
    await asked.pool.commit_tokens(24)  # another's
    await asked.pool.commit_tokens(24, "mine")
    await asked.answer()
    [fetched] = asked.tokenizer_manager.fetched
    assert fetched.cache_salt == "mine"


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": PROMPT[: STEP + 1][:STEP]},  # no step before its end
        {"input_ids": [PROMPT, PROMPT]},
        {"text": ["1 2", "3 4"]},
        {"input_ids": PROMPT, "image_data": "data:,x"},
        {"input_ids": PROMPT, "lora_path": "adapter"},
    ],
)
async def test_what_cannot_be_pulled_ahead_is_left_alone(body: dict[str, Any]) -> None:
    asked = Asked(body)
    assert await asked.answer() == (200, {"pulled_tokens": 0})
    assert asked.tokenizer_manager.fetched == []


async def test_a_worker_of_several_host_memories_pulls_nothing_ahead() -> None:
    asked = Asked({"input_ids": PROMPT}, dp_size=2)
    await asked.pool.commit_tokens(24)
    assert await asked.answer() == (200, {"pulled_tokens": 0})


async def test_nonsense_is_refused() -> None:
    assert (await Asked({}, "/v1/other").answer())[0] == 404
    assert (await Asked({"text": 5}).answer())[0] == 400
