"""The live page on the admin port: its files and its events.

A browser cannot open a page with `Authorization: Bearer`. So these routes also accept the admin key as the
password of HTTP Basic. Only these routes do, because they only read: a browser also sends a stored password
with requests that another site causes (CSRF), and the other admin routes change things.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Final

import fastapi
import msgspec
from fastapi.responses import RedirectResponse, Response, StreamingResponse

from pdserve.router.admin.live_feed import MAX_LISTENERS, LiveFeed

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
