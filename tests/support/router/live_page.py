"""The admin port of a router in this process, with its live page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdserve.router.admin.app import AdminApp
from pdserve.router.admin.live import LiveFeed
from pdserve.router.http.serving import make_server
from pdserve.security.tls import Certificates
from tests.support.router.harness import Harness, served

KEY = "administrators-key-of-this-test"
CACHED = "x-pdserve-cached: device=10, host=5, pool=100, computed=7\r\n"


@asynccontextmanager
async def shown(harness: Harness, interval_s: float = 0.2) -> AsyncIterator[str]:
    """The admin port of a router; its URL."""
    config = harness.router.config
    feed = LiveFeed(harness.router, interval_s)
    tls = Certificates(config.admin.tls).lasting_server_context()
    async with served(make_server(AdminApp(harness.router, feed), config, tls)) as port:
        feeding = asyncio.create_task(feed.run())
        try:
            yield f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
        finally:
            feeding.cancel()
