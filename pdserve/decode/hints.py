"""`POST /v1/kv/prefetch` and `/v1/kv/demote`: a client says what becomes of a prompt's pages.

The bodies are those of a look-up: the prompt of the turn that comes, or the conversation that is over. So a
hint needs nothing that a worker remembers, and a client with its own salt reaches its own pages only.

Hints are carried out as far as there is room, and nothing rests on them. A worker carries out `MAX_AT_ONCE`
prefetches at a time, each for `LIMIT_S` at most; others are answered 429.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from pdserve.decode.lookup import Asked, Lookup, Prompt, decoded
from pdserve.engine.page_names import PageNames
from pdserve.engine.sglang.prompt import fetch_pages
from pdserve.errors import RequestError
from pdserve.kvpool.client.async_client import MEMORY, AsyncPoolClient

PREFETCH: Final = "/v1/kv/prefetch"
DEMOTE: Final = "/v1/kv/demote"
MAX_AT_ONCE: Final = 4
LIMIT_S: Final = 10.0


class Wanted(Asked):
    """The body of a prefetch."""

    to: Literal["pool", "worker"] = "worker"
    """How far up: memory of the pool's nodes, or host memory of this worker."""


class Prefetched(msgspec.Struct, kw_only=True):
    """The answer to it."""

    prompt_tokens: int
    tokens: int
    """Of the longest prefix that the pool has."""
    prefetched_tokens: int
    """Of these, those that were brought up, or were there before."""


class Demoted(msgspec.Struct, kw_only=True):
    """The answer to a demotion."""

    prompt_tokens: int
    parts: int
    """Of the prompt's pages, as each rank has them, those that the pool has."""


class Hints:
    """The routes. `engine` gives SGLang's tokenizer manager at request time."""

    def __init__(self, engine: Any, pool: AsyncPoolClient, lookup: Lookup, *, names: PageNames) -> None:
        self._engine = engine
        self._pool = pool
        self._lookup = lookup
        self._names = names
        self._running: set[asyncio.Task[int]] = set()

    def router(self) -> APIRouter:
        """The FastAPI router with the routes."""
        router = APIRouter()
        router.add_api_route(PREFETCH, self.prefetch, methods=["POST"], response_model=None)
        router.add_api_route(DEMOTE, self.demote, methods=["POST"], response_model=None)
        return router

    async def prefetch(self, request: Request) -> Response:
        """Answers with `Prefetched`, once it is done or `LIMIT_S` is over."""
        try:
            return _json(await self._prefetched(request))
        except RequestError as error:
            return JSONResponse(error.body(), status_code=error.status)

    async def demote(self, request: Request) -> Response:
        """Answers with `Demoted`."""
        try:
            body = await request.body()
            prompt = await self._lookup.prompt(request, decoded(body, Asked), body)
        except RequestError as error:
            return JSONResponse(error.body(), status_code=error.status)
        keys = await asyncio.to_thread(prompt.pages.all_keys)
        parts = await self._pool.demote(keys)
        return _json(Demoted(prompt_tokens=len(prompt.tokens), parts=parts))

    async def _prefetched(self, request: Request) -> Prefetched:
        body = await request.body()
        wanted = decoded(body, Wanted)
        prompt = await self._lookup.prompt(request, wanted, body)
        there = await self._lookup.there(prompt.pages)
        pages = await asyncio.to_thread(prompt.restorable, there.keys())
        if len(self._running) >= MAX_AT_ONCE:
            message = f"This worker prefetches for {MAX_AT_ONCE} others."
            raise RequestError(429, message, type_="rate_limit_error")
        job = self._to_worker(prompt, pages) if wanted.to == "worker" else self._to_memory(prompt, pages)
        task = asyncio.create_task(job)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        # what has begun goes on when the client hangs up, or does not wait
        done, _ = await asyncio.wait({task}, timeout=LIMIT_S)
        return Prefetched(
            prompt_tokens=len(prompt.tokens),
            tokens=pages * self._names.page_size,
            prefetched_tokens=task.result() * self._names.page_size if done else 0,
        )

    async def _to_memory(self, prompt: Prompt, pages: int) -> int:
        """The pages of the prefix that are in memory then."""
        keys = await asyncio.to_thread(prompt.prefix(pages).all_keys)
        await self._pool.raise_pages(keys, LIMIT_S)
        there = await self._lookup.there(prompt.pages)
        in_memory = {key for key, place in there.items() if place.tier == MEMORY}
        return await asyncio.to_thread(prompt.restorable, in_memory)

    async def _to_worker(self, prompt: Prompt, pages: int) -> int:
        """The pages that SGLang was asked to fetch."""
        manager = self._engine.tokenizer_manager
        if not pages or prompt.request is None or manager.server_args.dp_size > 1:  # into which host memory?
            return 0
        tokens = prompt.tokens[: pages * self._names.page_size + self._names.tokens_after]
        try:
            async with asyncio.timeout(LIMIT_S):
                await fetch_pages(manager, tokens, prompt.request)
        except TimeoutError:
            return 0
        return pages


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
