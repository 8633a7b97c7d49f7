"""When are pages that SGLang stores in the background committed in the pool?

SGLang answers before it has stored a request's pages, and reports no end of it. So a worker names the pages
(`page_names`) and lets the pool report the commit of the last one of each sequence, which SGLang stores last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final, Protocol

from pdserve.engine.page_names import Pool, RequestPages, committed_pages

MOMENT_S: Final = 0.5
"""Pages that come at all are usually there within 0.1 s."""


class WaitingPool(Pool, Protocol):
    """What is asked here of an `AsyncPoolClient`."""

    async def wait(self, keys: list[bytes], timeout_s: float, tenant: str) -> list[bool]: ...


class Commits:
    """Of one worker; used in its event loop. Where the last page of a request never came (the pool is full,
    or refuses pages), later waits are cut to `MOMENT_S`, until the last page of some request comes again,
    whether somebody still waits for it or not: on a busy machine all may take longer than a moment.
    """

    def __init__(self, pool: WaitingPool, timeout_s: float) -> None:
        """`timeout_s`: the longest wait."""
        self._pool = pool
        self._timeout_s = timeout_s
        self._arrive = True
        self._late: asyncio.Task[None] | None = None
        """Looks whether pages come that nobody waits for any more; one request's at a time."""

    def limit_s(self, timeout_s: float | None = None) -> float:
        """How long a wait may take now; `timeout_s`: what the caller allows."""
        allowed_s = self._timeout_s if timeout_s is None else timeout_s
        return allowed_s if self._arrive else min(allowed_s, MOMENT_S)

    async def wait(self, pages: RequestPages, found: Collection[bytes] = (), *, is_cut: bool = False) -> bool:
        """Until the ends of the pages are committed, at most `timeout_s`; `is_cut`: at most `limit_s`. True:
        all are.

        `found`: ends that SGLang may have had in its own cache. It stores a page once. One that it found is
        in the pool or a moment away; if not, the pool has lost it and nobody stores it again here.
        """
        computed = [key for key in pages.ends() if key not in found]
        there: list[bool] = []
        if computed:
            limit_s = self.limit_s() if is_cut else self._timeout_s
            there = await self._pool.wait(computed, limit_s, pages.tenant)
            self._arrive = pages.arrived(there)
            if not self._arrive and limit_s < self._timeout_s and (self._late is None or self._late.done()):
                self._late = asyncio.create_task(self._follow(pages, computed))
        if found:
            there += await self._pool.wait([*found], min(MOMENT_S, self._timeout_s), pages.tenant)
        return all(there)

    async def _follow(self, pages: RequestPages, computed: list[bytes]) -> None:
        if pages.arrived(await self._pool.wait(computed, self._timeout_s, pages.tenant)):
            self._arrive = True

    async def count(self, pages: RequestPages) -> int:
        """How many of the pages are committed now."""
        return await committed_pages(self._pool, pages)
