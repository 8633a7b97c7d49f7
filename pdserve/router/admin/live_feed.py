"""Samples of the routers and the pool, as frames for the viewers of the live page.

A sample costs a few milliseconds. The interval is `WATCHED_S` while the page has viewers, else `QUIET_S`, so
the page shows a history when it is opened. A slow viewer misses frames.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.errors import PdserveError
from pdserve.kvpool.admin.sampling import Nodes, Rates, Row
from pdserve.kvpool.protocol.messages import NodeAddress
from pdserve.router.admin.live_frames import (
    Frame,
    Point,
    Problem,
    RouterView,
    frame_of,
    point_of,
    router_view,
)
from pdserve.router.admin.other_routers import Figures, OtherRouters, Silent
from pdserve.router.metrics.snapshot import Snapshot, add_up

if TYPE_CHECKING:
    from pdserve.router.app.router import Router

logger = logging.getLogger(__name__)

WATCHED_S: Final = 2.0
QUIET_S: Final = 10.0
POOL_TIMEOUT_S: Final = 1.0
MAX_POINTS: Final = 300
MAX_PROBLEMS: Final = 50
MAX_LISTENERS: Final = 32


class Problems(logging.Handler):
    """Keeps the newest warnings and errors of this process's log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.kept: deque[Problem] = deque(maxlen=MAX_PROBLEMS)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the record's first line. A repeated line is counted."""
        text = record.getMessage().partition("\n")[0][:500]
        count = 1
        if self.kept and self.kept[0].text == text:
            count += self.kept.popleft().count
        self.kept.appendleft(Problem(record.created, record.levelname.lower(), text, count))


class LiveFeed:
    """Makes frames while `run` runs, and sends them to viewers."""

    def __init__(self, router: Router, others: OtherRouters, interval_s: float = WATCHED_S) -> None:
        self._router = router
        self._others = others
        self._interval_s = interval_s
        pool = router.config.admin.pool
        self._pool = Nodes(pool, "", POOL_TIMEOUT_S) if pool else None
        self._before: dict[str, Snapshot] = {}
        """Each router's last sample."""
        self._before_s = 0.0
        self._problems = Problems()
        self.points: deque[Point] = deque(maxlen=MAX_POINTS)
        self.frame: Frame | None = None
        self._number = 0
        self._changed = asyncio.Condition()
        self._wake = asyncio.Event()
        self.listeners = 0

    async def run(self) -> None:
        """Make a frame at each interval, until cancelled. A failed sample is logged."""
        root = logging.getLogger("pdserve")
        root.addHandler(self._problems)
        try:
            while True:
                try:
                    await self._sample()
                except PdserveError as error:
                    logger.warning("the live page is not updated: %s", error)
                except Exception:  # boundary: an error of the page must not stop the router
                    logger.exception("the live page could not be updated")
                self._wake.clear()
                timeout_s = self._interval_s if self.listeners else max(QUIET_S, self._interval_s)
                try:
                    async with asyncio.timeout(timeout_s):
                        await self._wake.wait()
                except TimeoutError:
                    continue
                await asyncio.sleep(self._interval_s)
        finally:
            root.removeHandler(self._problems)

    async def figures(self) -> Figures:
        """What this router tells the others. Raises RequestError when there is no sum."""
        return Figures(
            self._others.router, self._others.name, await self._router.metrics(), list(self._problems.kept)
        )

    async def _sample(self) -> None:
        own, others = await asyncio.gather(self.figures(), self._others.ask())
        now_s, at_s = time.monotonic(), time.time()
        rows = await asyncio.to_thread(self._rows, self._pool) if self._pool is not None else []
        seen = [own, *(one for one in others if isinstance(one, Figures))]
        seconds = max(now_s - (self._before_s or now_s), 1e-3)
        # of a router that was not seen before, or not in between, nothing is known to have grown
        before = {one.router: self._before.get(one.router, one.metrics) for one in seen}
        self._before, self._before_s = {one.router: one.metrics for one in seen}, now_s
        metrics = add_up(one.metrics for one in seen)
        point = point_of(add_up(before.values()), metrics, seconds, at_s)
        routers: list[RouterView] = []
        if others:
            routers = [router_view(one.name, before[one.router], one.metrics, seconds) for one in seen]
            routers += [RouterView(one.name, one.error) for one in others if isinstance(one, Silent)]
        self.points.append(point)
        self.frame = frame_of(
            point, seconds, metrics, self._router.fleet.workers, rows, _problems(own, seen[1:]), routers
        )
        async with self._changed:
            self._number += 1
            self._changed.notify_all()

    def _rows(self, pool: Nodes) -> list[Row]:
        """A row for each pool node. If no node answers, a row for each configured address. Blocks."""
        try:
            return pool.sample()
        except PdserveError as error:
            addresses = self._router.config.admin.pool
            return [Row(NodeAddress(a, a), None, str(error), Rates(a), []) for a in addresses]

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events: first `history` (all points), then a `frame` for each sample."""
        self.listeners += 1
        self._wake.set()
        try:
            yield _event("history", list(self.points)[:-1])  # the last point is part of its frame
            seen = 0
            while True:
                seen = await self._newer_than(seen)
                yield _event("frame", self.frame)
        finally:
            self.listeners -= 1

    async def _newer_than(self, number: int) -> int:
        """Wait for a frame later than `number`. Returns its number."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._number > number)
        return self._number


def _problems(own: Figures, others: Sequence[Figures]) -> list[Problem]:
    """Those of all routers, the newest first."""
    found = list(own.problems)
    for other in others:
        found += [msgspec.structs.replace(one, router=other.name) for one in other.problems[:MAX_PROBLEMS]]
    return sorted(found, key=lambda one: -one.at_s)[:MAX_PROBLEMS]


def _event(name: str, value: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))
