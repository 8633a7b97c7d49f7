"""Conversations whose pages the pool is to keep for a while, or to let go, as their clients want it.

A request that comes with `x-pdserve-keep: SECONDS` has its pages kept once it is answered and they are in the
pool. One that comes with `x-pdserve-final: TOKENS` is the last of its conversation: its pages go before
others, but for those of the first tokens, with which other conversations may begin. These are hints: pages
that are not there are not kept, and whatever fails costs nobody anything. `hints` does the same later on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Final

from pdserve.engine.http.request import HttpRequest
from pdserve.engine.page_names import RequestPages
from pdserve.errors import PoolError
from pdserve.kvpool.client.async_client import AsyncPoolClient

logger = logging.getLogger(__name__)

LIMIT_S: Final = 10.0
"""For one conversation's pages."""


class Keeping:
    """Lives in the worker's event loop."""

    def __init__(self, pool: AsyncPoolClient) -> None:
        self._pool = pool
        self._tasks: set[asyncio.Task[int]] = set()

    def after(self, request: HttpRequest, pages: RequestPages) -> None:
        """The request is answered, and its pages are in the pool: what it wants of them is done beside
        whatever comes.
        """
        if request.shared_tokens is not None:
            hint = self._let_go(pages, request.shared_tokens)
        elif request.keep_s:
            hint = self._keep(pages, request.keep_s)
        else:
            return
        task = asyncio.create_task(hint)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, pages: RequestPages, keep_s: int) -> int:
        keys = await asyncio.to_thread(pages.all_keys)
        return await _tried(self._pool.keep(keys, keep_s, pages.tenant))

    async def _let_go(self, pages: RequestPages, shared_tokens: int) -> int:
        keys = await asyncio.to_thread(pages.keys_behind, shared_tokens)
        await _tried(self._pool.keep(keys, -1, pages.tenant))
        return await _tried(self._pool.demote(keys, pages.tenant))


async def _tried(hint: Coroutine[None, None, int]) -> int:
    """What the pool says to a hint; 0 where it says nothing."""
    try:
        async with asyncio.timeout(LIMIT_S):
            return await hint
    except (PoolError, TimeoutError) as error:
        logger.debug("a hint to the pool has no effect: %s", error)
        return 0
