"""`POST /v1/kv/hints`: a client says what becomes of a prompt's pages.

The body is that of a look-up with SGLang's envelope of hints, `kv_hints`: the prompt of the turn that comes,
or the conversation that is over. So a hint needs nothing that a worker remembers, and a client with its own
salt reaches its own pages only.

    {"messages": [...], "kv_hints": {"protocol_version": "1.0", "message_id": "m1", "actions": [
        {"action_id": "a1", "action_type": "retain", "action_version": "1.0", "payload": {"ttl_s": 60}}]}}

| action | payload | what it does |
|---|---|---|
| prefetch | to: worker or pool | brings pages up, to host memory of this worker or the memory of nodes |
| demote | | has the pages evicted before others |
| retain | ttl_s | has the pages kept for so long; 0: no longer |
| pin | ttl_s, or none: a day | the same: nothing is kept for ever |

Each action has an answer of its own: `done` with what it came to, `unsupported`, `invalid`, `busy` or
`failed`. Hints are carried out as far as there is room, and nothing rests on them. A worker carries out
`MAX_AT_ONCE` prefetches at a time, each for `LIMIT_S` at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from msgspec import Meta

from pdserve.decode.lookup import Asked, Lookup, Prompt, decoded
from pdserve.engine.page_names import PageNames
from pdserve.engine.sglang.prompt import fetch_pages
from pdserve.errors import PoolError, RequestError
from pdserve.kvpool.client.async_client import MEMORY, AsyncPoolClient
from pdserve.kvpool.protocol.messages import MAX_KEEP_S

HINTS: Final = "/v1/kv/hints"
VERSION: Final = "1.0"
MAX_AT_ONCE: Final = 4
MAX_ACTIONS: Final = 16
LIMIT_S: Final = 10.0


class Action(msgspec.Struct):
    """One hint; others may have more members."""

    action_id: str
    action_type: str
    action_version: str
    payload: msgspec.Raw = msgspec.Raw(b"{}")


class Envelope(msgspec.Struct):
    """As SGLang's `KvHintsEnvelope`."""

    protocol_version: str
    message_id: str
    actions: Annotated[list[Action], Meta(max_length=MAX_ACTIONS)] = []


class Hinted(Asked):
    """The body."""

    kv_hints: Envelope | None = None


class ToWhere(msgspec.Struct):
    """Of a prefetch."""

    to: Literal["pool", "worker"] = "worker"
    """How far up: memory of the pool's nodes, or host memory of this worker."""


class ForHowLong(msgspec.Struct):
    """Of what is to be kept."""

    ttl_s: Annotated[int, Meta(ge=0, le=MAX_KEEP_S)]


class UntilWhen(msgspec.Struct):
    """Of a pin."""

    ttl_s: Annotated[int, Meta(ge=0, le=MAX_KEEP_S)] = MAX_KEEP_S


class Result(msgspec.Struct, kw_only=True):
    """What became of an action."""

    action_id: str
    status: Literal["done", "unsupported", "invalid", "busy", "failed"] = "done"
    prefetched_tokens: int | None = None
    """Of the longest prefix that the pool has, those that were brought up, or were there before."""
    parts: int | None = None
    """Of the prompt's pages, as each rank has them, those that the pool has."""


class Answer(msgspec.Struct, kw_only=True):
    """The answer to all."""

    message_id: str
    prompt_tokens: int
    results: list[Result]
    protocol_version: str = VERSION


class _BusyError(Exception):
    """Too many prefetches run."""


class Hints:
    """The route. `engine` gives SGLang's tokenizer manager at request time."""

    def __init__(self, engine: Any, pool: AsyncPoolClient, lookup: Lookup, *, names: PageNames) -> None:
        self._engine = engine
        self._pool = pool
        self._lookup = lookup
        self._names = names
        self._running: set[asyncio.Task[int]] = set()
        self._kinds: dict[str, Callable[[Prompt, Action], Awaitable[Result]]] = {
            "prefetch": self._prefetch,
            "demote": self._demote,
            "retain": self._retain,
            "pin": self._pin,
        }

    def router(self) -> APIRouter:
        """The FastAPI router with the route."""
        router = APIRouter()
        router.add_api_route(HINTS, self.answer, methods=["POST"], response_model=None)
        return router

    async def answer(self, request: Request) -> Response:
        """Answers with an `Answer`, once all is done or `LIMIT_S` is over for each."""
        try:
            body = await request.body()
            asked = decoded(body, Hinted)
            if asked.kv_hints is None:
                raise RequestError(400, "kv_hints says what to do with the prompt", param="kv_hints")
            prompt = await self._lookup.prompt(request, asked, body)
        except RequestError as error:
            return JSONResponse(error.body(), status_code=error.status)
        results = [await self._carried_out(prompt, action) for action in asked.kv_hints.actions]
        made = Answer(message_id=asked.kv_hints.message_id, prompt_tokens=len(prompt.tokens), results=results)
        return Response(msgspec.json.encode(made), media_type="application/json")

    async def _carried_out(self, prompt: Prompt, action: Action) -> Result:
        kind = self._kinds.get(action.action_type.removeprefix("kv."))
        if kind is None or action.action_version.partition(".")[0] != "1":
            return Result(action_id=action.action_id, status="unsupported")
        try:
            return await kind(prompt, action)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return Result(action_id=action.action_id, status="invalid")
        except _BusyError:
            return Result(action_id=action.action_id, status="busy")
        except PoolError:
            return Result(action_id=action.action_id, status="failed")

    async def _retain(self, prompt: Prompt, action: Action) -> Result:
        return await self._kept(prompt, action, msgspec.json.decode(action.payload, type=ForHowLong).ttl_s)

    async def _pin(self, prompt: Prompt, action: Action) -> Result:
        return await self._kept(prompt, action, msgspec.json.decode(action.payload, type=UntilWhen).ttl_s)

    async def _kept(self, prompt: Prompt, action: Action, seconds: int) -> Result:
        keys = await asyncio.to_thread(prompt.pages.all_keys)
        parts = await self._pool.keep(keys, seconds or -1, prompt.pages.tenant)
        return Result(action_id=action.action_id, parts=parts)

    async def _demote(self, prompt: Prompt, action: Action) -> Result:
        keys = await asyncio.to_thread(prompt.pages.all_keys)
        return Result(action_id=action.action_id, parts=await self._pool.demote(keys, prompt.pages.tenant))

    async def _prefetch(self, prompt: Prompt, action: Action) -> Result:
        wanted = msgspec.json.decode(action.payload, type=ToWhere)
        there = await self._lookup.there(prompt.pages)
        pages = await asyncio.to_thread(prompt.restorable, there.keys())
        if len(self._running) >= MAX_AT_ONCE:
            raise _BusyError
        job = self._to_worker(prompt, pages) if wanted.to == "worker" else self._to_memory(prompt, pages)
        task = asyncio.create_task(job)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        # what has begun goes on when the client hangs up, or does not wait
        done, _ = await asyncio.wait({task}, timeout=LIMIT_S)
        tokens = task.result() * self._names.page_size if done else 0
        return Result(action_id=action.action_id, prefetched_tokens=tokens)

    async def _to_memory(self, prompt: Prompt, pages: int) -> int:
        """The pages of the prefix that are in memory then."""
        keys = await asyncio.to_thread(prompt.prefix(pages).all_keys)
        await self._pool.raise_pages(keys, LIMIT_S, prompt.pages.tenant)
        there = await self._lookup.there(prompt.pages)
        in_memory = {key for key, tier in there.items() if tier == MEMORY}
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
