"""The mock worker passes the contract that real ones pass in tests/e2e/test_worker_contract.py."""

from __future__ import annotations

import httpx
import pytest

from tests.support.router.contract import CHECKS, Check
from tests.support.router.harness import run
from tests.support.router.mock_worker import MockWorker, workers


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_mock_worker(check: Check) -> None:
    async def main() -> None:
        mock = MockWorker("decode")
        async with workers(mock), httpx.AsyncClient(base_url=mock.url, timeout=60) as client:
            await check(client, (await client.get("/pd/info")).json()["model"])

    run(main(), timeout_s=120)
