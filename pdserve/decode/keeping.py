"""Conversations whose pages the pool is to keep for a while, as their clients want it.

A request that comes with `x-pdserve-keep: SECONDS` has its pages kept once it is answered and they are in the
pool. `POST /pd/keep` renews that, or ends it. One that comes with `x-pdserve-final: TOKENS` is the last of
its conversation: its pages go before others, but for those of the first tokens, with which other
conversations may begin. These are hints: pages that are not there are not kept, and whatever fails costs
nobody anything.

Bounds: at most `MAX_CONVERSATIONS` can be renewed, the newest ones. Their pages are kept all the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from msgspec import Meta

from pdserve.engine.http.request import HttpRequest
from pdserve.engine.page_names import RequestPages
from pdserve.errors import PoolError, RequestError
from pdserve.kvpool.client.async_client import AsyncPoolClient
from pdserve.kvpool.protocol.messages import MAX_KEEP_S

logger = logging.getLogger(__name__)

MAX_CONVERSATIONS: Final = 512
LIMIT_S: Final = 10.0
"""For one conversation's pages."""


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `/pd/keep`. `request_id` is the x-request-id of the conversation's last request; `keep_s`
    counts from now on, and 0 ends it.
    """

    request_id: str
    keep_s: Annotated[int, Meta(ge=0, le=MAX_KEEP_S)]


class Keeping:
    """Lives in the worker's event loop."""

    def __init__(self, pool: AsyncPoolClient) -> None:
        self._pool = pool
        self._known: OrderedDict[str, RequestPages] = OrderedDict()
        """By request id, the newest at the end."""
        self._tasks: set[asyncio.Task[int]] = set()

    def after(self, request: HttpRequest, pages: RequestPages) -> None:
        """The request is answered, and its pages are in the pool: what it wants of them is done beside
        whatever comes.
        """
        if request.shared_tokens is not None:
            self.let_go(request.request_id, pages, request.shared_tokens)
        elif request.keep_s:
            self.begin(request.request_id, pages, request.keep_s)

    def begin(self, request_id: str, pages: RequestPages, keep_s: int) -> None:
        """The request's pages are in the pool: have them kept, beside whatever comes."""
        self._known[request_id] = pages
        self._known.move_to_end(request_id)
        while len(self._known) > MAX_CONVERSATIONS:
            self._known.popitem(last=False)
        task = asyncio.create_task(self._keep(pages, keep_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def let_go(self, request_id: str, pages: RequestPages, shared_tokens: int) -> None:
        """The conversation is over: have its pages behind those that others may use evicted before others."""
        self._known.pop(request_id, None)
        task = asyncio.create_task(self._let_go(pages, shared_tokens))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wish(self, request: Request) -> Response:
        """Answers a `Wish` with how many of the conversation's page parts the pool has; `known` is false
        where this worker does not know the request.
        """
        try:
            wish = msgspec.json.decode(await request.body(), type=Wish)
        except msgspec.MsgspecError as error:
            refusal = RequestError(400, str(error))
            return JSONResponse(refusal.body(), status_code=refusal.status)
        pages = self._known.get(wish.request_id)
        if pages is None:
            return JSONResponse({"known": False, "parts": 0})
        if not wish.keep_s:
            del self._known[wish.request_id]
        parts = await self._keep(pages, wish.keep_s or -1)
        return JSONResponse({"known": True, "parts": parts})

    def router(self) -> APIRouter:
        """The FastAPI router with the route."""
        router = APIRouter()
        router.add_api_route("/pd/keep", self.wish, methods=["POST"], response_model=None)
        return router

    async def _keep(self, pages: RequestPages, keep_s: int) -> int:
        keys = await asyncio.to_thread(pages.all_keys)
        return await _tried(self._pool.keep(keys, keep_s))

    async def _let_go(self, pages: RequestPages, shared_tokens: int) -> int:
        keys = await asyncio.to_thread(pages.keys_behind, shared_tokens)
        await _tried(self._pool.keep(keys, -1))
        return await _tried(self._pool.demote(keys))


async def _tried(hint: Coroutine[None, None, int]) -> int:
    """What the pool says to a hint; 0 where it says nothing."""
    try:
        async with asyncio.timeout(LIMIT_S):
            return await hint
    except (PoolError, TimeoutError) as error:
        logger.debug("a hint to the pool has no effect: %s", error)
        return 0
