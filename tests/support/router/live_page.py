"""The admin port of a router in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from pdserve.router.admin.app import AdminApp
from pdserve.router.http.serving import make_server
from pdserve.security.tls import Certificates
from tests.support.router.harness import Harness, served

KEY = "administrators-key-of-this-test"
CACHED = "x-pdserve-cached: device=10, host=5, pool=100, computed=7\r\n"


@asynccontextmanager
async def shown(harness: Harness) -> AsyncIterator[str]:
    """The admin port of a router; its URL."""
    config = harness.router.config
    tls = Certificates(config.admin.tls).lasting_server_context()
    async with served(make_server(AdminApp(harness.router), config, tls)) as port:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"


def client_of(harness: Harness, key: str = KEY) -> httpx.AsyncClient:
    """A client of its admin API, without a socket; `key` may be empty."""
    transport = httpx.ASGITransport(AdminApp(harness.router))  # type: ignore[arg-type]
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(transport=transport, base_url="http://admin", headers=headers)
