"""The mock worker passes the contract that real ones pass in tests/e2e/test_worker_contract.py."""

from __future__ import annotations

import httpx
import pytest

from tests.support.router.contract import ANY_ENGINE, CASES, IDS, Check
from tests.support.router.mock_worker import MockWorker, workers
from tests.support.router.vllm_worker import VllmWorker


@pytest.mark.parametrize(("role", "check"), CASES, ids=IDS)
@pytest.mark.timeout(120)
async def test_the_mock_worker(role: str, check: Check) -> None:
    mock = MockWorker(role)
    async with workers(mock), httpx.AsyncClient(base_url=mock.url, timeout=60) as client:
        await check(client, mock.info["model"])


@pytest.mark.parametrize("check", ANY_ENGINE, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", [MockWorker, VllmWorker])
async def test_what_any_engine_must_pass(kind: type[MockWorker], check: Check) -> None:
    mock = kind("decode")
    async with workers(mock), httpx.AsyncClient(base_url=mock.url, timeout=60) as client:
        await check(client, mock.info["model"])
