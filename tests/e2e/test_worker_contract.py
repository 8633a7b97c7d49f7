"""Real workers pass the contract that the router's scripted workers pass."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.support.e2e.site import Cluster
from tests.support.router.contract import CASES, IDS, Check

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(("role", "check"), CASES, ids=IDS)
def test_a_real_worker(cluster: Cluster, role: str, check: Check) -> None:
    async def main() -> None:
        worker = cluster.decode[0] if role == "decode" else cluster.prefill[0]
        async with httpx.AsyncClient(base_url=worker.url, timeout=60) as client:
            await check(client, "demo-tiny")

    asyncio.run(main())
