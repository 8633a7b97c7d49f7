"""The live page on the admin port: its files, and samples of router and pool as frames for its viewers.

A sample costs a few milliseconds. The interval is `WATCHED_S` while the page has viewers, else `QUIET_S`, so
the page shows a history when it is opened. A slow viewer misses frames.

A browser cannot open a page with `Authorization: Bearer`. So these routes also accept the admin key as the
password of HTTP Basic. Only these routes do, because they only read: a browser also sends a stored password
with requests that another site causes (CSRF), and the other admin routes change things.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import fastapi
import msgspec
from fastapi.responses import RedirectResponse, Response, StreamingResponse

from pdserve.errors import PdserveError
from pdserve.kvpool.admin.sampling import Nodes, Rates, Row
from pdserve.kvpool.protocol.messages import NodeAddress
from pdserve.router.admin.live_frames import (
    Frame,
    Point,
    Problem,
    frame_of,
    point_of,
)
from pdserve.router.metrics.stats import Snapshot

if TYPE_CHECKING:
    from pdserve.router.app.router import Router

logger = logging.getLogger(__name__)

WATCHED_S: Final = 2.0
QUIET_S: Final = 10.0
POOL_TIMEOUT_S: Final = 1.0
MAX_POINTS: Final = 300
MAX_PROBLEMS: Final = 50
MAX_LISTENERS: Final = 32

BASIC: Final = 'Basic realm="pdserve: any name, and the admin key as password", charset="UTF-8"'
PAGE: Final = Path(__file__).parent / "static"
FILES: Final = {
    "": ("page.html", "text/html; charset=utf-8"),
    "page.js": ("page.js", "text/javascript; charset=utf-8"),
    "page.css": ("page.css", "text/css; charset=utf-8"),
}
HEADERS: Final = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


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

    def __init__(self, router: Router, interval_s: float = WATCHED_S) -> None:
        self._router = router
        self._interval_s = interval_s
        pool = router.config.admin.pool
        self._pool = Nodes(pool, "", POOL_TIMEOUT_S) if pool else None
        self._before: Snapshot | None = None
        """The last sample."""
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

    async def _sample(self) -> None:
        metrics = await self._router.metrics()
        now_s, at_s = time.monotonic(), time.time()
        rows = await asyncio.to_thread(self._rows, self._pool) if self._pool is not None else []
        seconds = max(now_s - (self._before_s or now_s), 1e-3)
        point = point_of(self._before or metrics, metrics, seconds, at_s)
        self._before, self._before_s = metrics, now_s
        self.points.append(point)
        self.frame = frame_of(
            point, seconds, metrics, self._router.fleet.workers, rows, list(self._problems.kept)
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


def _event(name: str, value: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))


def is_of_live_page(path: str) -> bool:
    """Whether `path` belongs to the live page."""
    return path == "/" or path == "/live" or path.startswith("/live/")


def password_as_bearer(headers: dict[bytes, bytes]) -> None:
    """Replace a HTTP Basic `authorization` in `headers` by a bearer token: its password."""
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"basic":
        try:
            password = base64.b64decode(given.strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            password = b""
        headers[b"authorization"] = b"Bearer " + password


def add_live_page(app: fastapi.FastAPI, feed: LiveFeed) -> None:
    """Add the page's routes to `app`."""
    files = {name: ((PAGE / file).read_bytes(), kind) for name, (file, kind) in FILES.items()}

    @app.get("/", include_in_schema=False)
    @app.get("/live", include_in_schema=False)
    async def to_page() -> Response:
        return RedirectResponse("/live/")

    @app.get("/live/events", response_class=StreamingResponse)
    async def events() -> Response:
        """Server-sent events: `history`, then a `frame` every two seconds."""
        if feed.listeners >= MAX_LISTENERS:
            return Response("too many look at this page", 503)
        return StreamingResponse(feed.events(), media_type="text/event-stream", headers=HEADERS)

    @app.get("/live/frame")
    async def frame() -> Response:
        """The newest frame as JSON. 503 before the first sample."""
        if feed.frame is None:
            return Response("nothing was sampled yet", 503)
        return Response(msgspec.json.encode(feed.frame), media_type="application/json", headers=HEADERS)

    @app.get("/live/{name:path}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in files:
            return Response("there is no such page", 404)
        content, kind = files[name]
        return Response(content, media_type=kind, headers=HEADERS)
