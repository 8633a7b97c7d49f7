"""The admin port of a router in this process, with its live page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdserve.router.admin.app import AdminApp
from pdserve.router.admin.live_feed import LiveFeed
from pdserve.router.server.listening import bind
from pdserve.router.server.uvicorn_server import make_server
from tests.support.router.harness import Harness

KEY = "administrators-key-of-this-test"
CACHED = "x-pdserve-cached: device=10, host=5, pool=100, computed=7\r\n"


@asynccontextmanager
async def shown(harness: Harness, interval_s: float = 0.2) -> AsyncIterator[str]:
    """The admin port of a router; its URL."""
    feed = LiveFeed(harness.router, interval_s)
    with bind("127.0.0.1", 0) as listening:
        server = make_server(AdminApp(harness.router, feed), harness.router.config)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        feeding = asyncio.create_task(feed.run())
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            feeding.cancel()
            server.should_exit = server.force_exit = True
            await serving
