"""Real workers pass the contract that the router's scripted workers pass."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.support.e2e.site import Cluster
from tests.support.router.contract import CHECKS, Check

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_decode_worker(cluster: Cluster, check: Check) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(base_url=cluster.decode[0].url, timeout=60) as client:
            await check(client, "demo-tiny")

    asyncio.run(main())
