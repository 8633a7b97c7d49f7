"""Waiting for the fleet: for a worker that comes or comes back, or for what a probe finds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from pdserve.router.fleet.registry import Fleet

T = TypeVar("T")


class WorkerWait:
    """Looks again after each event of the fleet (`Fleet.watchers`)."""

    def __init__(self, fleet: Fleet) -> None:
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Future[None] | None = None
        fleet.watchers.append(self._wake)

    async def until(self, find: Callable[[], T | None], end_s: float) -> T | None:
        """What `find` returns, as soon as it is not None; None at `end_s` on the loop's clock."""
        while (found := find()) is None and (left_s := end_s - self._loop.time()) > 0:
            if self._news is None:
                self._news = self._loop.create_future()
            await asyncio.wait({self._news}, timeout=left_s)
        return found

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set_result(None)
            self._news = None
