"""A pool as a worker asks it, one prompt with pages in it, and an SGLang that makes the prompt's tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from fastapi import Request

from pdserve.engine.http import request_context
from pdserve.engine.http.request import HttpRequest
from pdserve.engine.sglang.tokenizer_manager import SglangRequest
from pdserve.errors import PoolTimeout
from pdserve.kvpool.protocol.messages import Fate
from pdserve.pages import namespace_seed, page_hashes, pool_key
from tests.support.engine.manager import State

PAGE = 4
SUFFIXES = (b"-0", b"-1")
PROMPT = list(range(100, 118))  # 4 pages and two tokens
MEMORY, SSD = "dram", "ssd"


class Pool:
    """Pages by key, and where they are. A wait ends when its pages are there, or at its time. What is asked
    is noted.
    """

    def __init__(self, committed: Iterable[bytes] = ()) -> None:
        self.there: dict[bytes, str] = dict.fromkeys(committed, MEMORY)
        self.fate: Fate | None = Fate()
        self.fails = False
        self.waits: list[tuple[list[bytes], float]] = []
        self.lookups = 0
        self.asked_fates: list[bytes] = []
        self.kept: list[tuple[int, float]] = []
        self.demoted: list[bytes] = []
        self.more = asyncio.Condition()

    def has(
        self,
        *places: str,
        salt: str | None = None,
        suffixes: Sequence[bytes] = SUFFIXES,
        prompt: Sequence[int] = PROMPT,
    ) -> None:
        """The first pages of the prompt, each at its place, at all ranks."""
        pages = page_hashes(prompt, PAGE, namespace_seed(None, salt))
        for page, place in zip(pages, places, strict=False):
            self.there |= {pool_key(page, suffix): place for suffix in suffixes}

    async def commit(self, keys: Iterable[bytes]) -> None:
        async with self.more:
            self.there |= dict.fromkeys(keys, MEMORY)
            self.more.notify_all()

    async def wait(self, keys: Sequence[bytes], timeout_s: float, tenant: str = "") -> list[bool]:
        self.waits.append((list(keys), timeout_s))
        try:
            async with asyncio.timeout(timeout_s), self.more:
                await self.more.wait_for(lambda: self.there.keys() >= set(keys))
        except TimeoutError:
            pass
        return [key in self.there for key in keys]

    async def exists(self, keys: Sequence[bytes], tenant: str = "") -> list[bool]:
        self.lookups += 1
        return [key in self.there for key in keys]

    async def places(self, keys: Sequence[bytes], tenant: str = "") -> list[str | None]:
        return [self.there.get(key) for key in keys]

    async def fates(self, keys: Sequence[bytes], tenant: str = "") -> list[Fate | None]:
        self.asked_fates += keys
        return [self.fate] * len(keys)

    async def raise_pages(self, keys: Sequence[bytes], timeout_s: float, tenant: str = "") -> int:
        self.there |= dict.fromkeys(keys, MEMORY)
        return len(keys)

    async def keep(self, keys: Sequence[bytes], keep_s: float, tenant: str = "") -> int:
        if self.fails:
            raise PoolTimeout("late")
        self.kept.append((len(keys), keep_s))
        return len(keys)

    async def demote(self, keys: Sequence[bytes], tenant: str = "") -> int:
        self.demoted += keys
        return sum(key in self.there for key in keys)


class Engine:
    """SGLang, whose tokens are the numbers in a text."""

    def __init__(self, dp_size: int = 2) -> None:
        self.tokenizer_manager = self
        self.server_args = SimpleNamespace(dp_size=dp_size)
        self.app_state = self.turns = None

    async def _tokenize_texts(self, text: str) -> tuple[list[int], None]:
        return list(map(int, text.split())), None


async def post(
    route: Callable[[Request], Awaitable[Any]], body: Any, salt: str | None = None
) -> tuple[int, dict[str, Any]]:
    """(status, answer) of a route, to a body of a request with this salt."""

    async def receive() -> dict[str, Any]:
        return {
            "type": "http.request",
            "body": body if isinstance(body, bytes) else json.dumps(body).encode(),
        }

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}
    said = {request_context.SALT_HEADER: json.dumps(salt).encode()} if salt else {}
    with request_context.RequestContext(said):
        answer = await route(Request(scope, receive))
    return answer.status_code, json.loads(bytes(answer.body))


def answered(
    request_id: str, prompt: Sequence[int], output: Sequence[int] = (1, 2), **more: Any
) -> HttpRequest:
    """A request whose one prompt SGLang has answered with this output."""
    request = HttpRequest(request_id, "/generate", **more)
    request.requests["r"] = SglangRequest("r", State(True, True, list(output)), list(prompt))
    request.answered.set()
    return request
