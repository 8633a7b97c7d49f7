"""How long a prefill waits for its pages, against a scripted pool and SGLang."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from pdserve.engine.http.cache_report import Found
from pdserve.engine.http.request import HttpRequest, RequestTracking, current_request
from pdserve.engine.http.timing import WorkerMetrics
from pdserve.engine.page_names import PageNames
from pdserve.engine.sglang.prompt import Prefilled
from pdserve.engine.sglang.tokenizer_manager import SglangRequest
from pdserve.pages import page_hashes
from pdserve.prefill import routes

PAGE = 4
PROMPT = list(range(16))


@dataclass
class Pool:
    """Holds `committed`; a wait for anything else lasts its whole time."""

    committed: set[bytes] = field(default_factory=set)
    cancelled: bool = False
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        self.asked.set()
        if not self.committed.issuperset(keys) and timeout_s > routes.FOUND_GRACE_S:
            try:
                await asyncio.sleep(timeout_s)
            except asyncio.CancelledError:
                self.cancelled = True
                raise
        return await self.exists(keys)

    async def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.committed for key in keys]


@dataclass
class State:
    dispatched: bool = True
    finished: bool = True


class Engine:
    """Stands in for SGLang's objects; nothing here is called."""

    app_state = None
    tokenizer_manager: Any = None


def serve(
    pool: Pool,
    monkeypatch: pytest.MonkeyPatch,
    cached: int,
    *,
    leaves: bool = False,
    prompt: list[int] | None = PROMPT,
) -> tuple[dict[str, Any], float]:
    """One /pd/prefill of PROMPT of which SGLang had `cached` tokens: the answer, and how long it took."""

    async def prefill_request(*_: Any) -> None: ...

    async def run_prefill(*_: Any) -> Prefilled:
        request = current_request()
        assert request is not None
        request.requests["r"] = SglangRequest("r", State(), prompt)
        return Prefilled(len(PROMPT), [Found(cached)], {"r": cached})

    monkeypatch.setattr(routes, "prefill_request", prefill_request)
    monkeypatch.setattr(routes, "run_prefill", run_prefill)
    prefill = routes.Prefill(
        Engine(), pool, names=PageNames(PAGE, [b""]), publish_timeout_s=60.0, metrics=WorkerMetrics()
    )  # type: ignore[arg-type]
    answer: list[dict[str, Any]] = []

    class Request:
        async def body(self) -> bytes:
            return b"{}"

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        response = await prefill.prefill(Request(), "/generate")  # type: ignore[arg-type]
        answer.append(json.loads(bytes(response.body)))

    async def run() -> None:
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

        async def send(_: Any) -> None: ...

        scope = {"type": "http", "path": "/pd/prefill", "headers": []}
        started: list[HttpRequest] = []
        serving = asyncio.create_task(
            RequestTracking(app, started.append)(scope, messages.get, send)  # type: ignore[arg-type]
        )
        if leaves:
            await pool.asked.wait()
            messages.put_nowait({"type": "http.disconnect"})
        await serving

    began_s = time.monotonic()
    asyncio.run(asyncio.wait_for(run(), 20))
    return answer[0], time.monotonic() - began_s


def test_all_pages_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, _ = serve(Pool(set(page_hashes(PROMPT, PAGE))), monkeypatch, 0)
    assert (answer["published_pages"], answer["missing_pages"]) == (4, 0)


def test_pages_that_the_pool_lost_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang has them in its own cache, and stores a page only once."""
    answer, took_s = serve(Pool(set(page_hashes(PROMPT, PAGE)[2:])), monkeypatch, 8)
    assert (answer["published_pages"], answer["missing_pages"]) == (2, 2)
    assert took_s < 10


def test_a_prompt_found_whole_whose_pages_are_lost_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole number of pages, of which SGLang never says that it found the last."""
    answer, took_s = serve(Pool(), monkeypatch, len(PROMPT) - PAGE)
    assert (answer["published_pages"], answer["missing_pages"]) == (0, 4)
    assert took_s < 10


def test_a_prompt_of_which_more_than_the_last_page_is_computed_is_waited_for() -> None:
    request = HttpRequest("id", "/pd/prefill", requests={"r": SglangRequest("r", State(), PROMPT)})
    pages = page_hashes(PROMPT, PAGE)
    for cached, found in [(0, 0), (4, 1), (8, 2), (12, 4)]:
        assert PageNames(PAGE, [b""]).found_of_prompts(request, {"r": cached}) == pages[:found]


def test_pages_that_cannot_be_named_are_not_said_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt with an image gets its token ids in the scheduler."""
    answer, _ = serve(Pool(), monkeypatch, 0, prompt=None)
    assert (answer["published_pages"], answer["missing_pages"]) == (0, 4)


def test_a_client_that_leaves_ends_the_wait_for_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    _, took_s = serve(pool, monkeypatch, 0, leaves=True)
    assert took_s < 10
    assert pool.cancelled


def test_when_nothing_arrives_only_the_first_prefill_waits_its_whole_time() -> None:
    async def run() -> list[float]:
        asked: list[float] = []

        class Full(Pool):
            async def wait(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
                asked.append(timeout_s)
                return await self.exists(keys)

        pool = Full()
        prefill = routes.Prefill(
            Engine(), pool, names=PageNames(PAGE, [b""]), publish_timeout_s=60.0, metrics=WorkerMetrics()
        )  # type: ignore[arg-type]
        keys = page_hashes(PROMPT, PAGE)
        for _ in range(2):
            await prefill._published(keys, keys[-1:], set())
        pool.committed.update(keys)
        for _ in range(2):
            await prefill._published(keys, keys[-1:], set())
        return asked

    grace = routes.FOUND_GRACE_S
    assert asyncio.run(run()) == [60.0, grace, grace, 60.0]
