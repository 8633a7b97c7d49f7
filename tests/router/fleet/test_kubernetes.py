"""Workers that a router finds as pods of Kubernetes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import ConfigError
from pdserve.router.config.limits import Probe
from pdserve.router.config.router import RouterConfig
from pdserve.settings.config_file import build_config
from tests.support.kubernetes.api_server import ApiServer, api_server, pod, settings
from tests.support.router.harness import PATIENT, Harness, routed
from tests.support.router.mock_worker import ANSWER, MockWorker, workers

WAIT_S = 20.0


@asynccontextmanager
async def watching(server: ApiServer, directory: Path) -> AsyncIterator[Harness]:
    """A router that knows of no worker but by its pod."""
    config = RouterConfig(
        kubernetes=settings(server, directory),
        probe=Probe(interval_s=0.1),
        min_prefill_tokens=0,
        deadlines=PATIENT,
    )
    async with routed(config) as harness:
        yield harness


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - others change it
            await asyncio.sleep(0.01)


def ready(harness: Harness) -> set[str]:
    return {worker.id for worker in harness.router.fleet.workers if worker.ready}


def pod_of(worker: MockWorker, name: str, **more: Any) -> dict[str, Any]:
    host, _, port = worker.id.rpartition(":")
    return pod(name, worker.role, ip=host, port=int(port), **more)


@pytest.mark.timeout(120)
async def test_workers_are_used_while_their_pods_run(tmp_path: Path) -> None:
    prefill, first, second = MockWorker("prefill"), MockWorker("decode"), MockWorker("decode")
    async with workers(prefill, first, second), api_server() as server:
        server.put(pod_of(first, "decode-0"))
        server.put(pod("pool-0", "pool", port=9100))  # the selector matches the whole cluster
        async with watching(server, tmp_path) as harness:
            assert (await harness.chat()).headers["x-pdserve-decode"] == first.id  # known from the start
            server.put(pod_of(prefill, "prefill-0"))
            server.put(pod_of(second, "decode-1"))
            await until(lambda: ready(harness) == {prefill.id, first.id, second.id})
            assert (await harness.chat()).headers["x-pdserve-prefill"] == prefill.id
            server.put(pod_of(second, "decode-1", deletionTimestamp="2026-11-25T10:00:00Z"))
            server.delete("prefill-0")
            await until(lambda: set(harness.router.fleet.by_id) == {first.id})
            assert (await harness.chat()).body == ANSWER


@pytest.mark.timeout(120)
async def test_a_router_starts_and_serves_while_the_api_server_is_away(tmp_path: Path) -> None:
    worker = MockWorker("agg")
    async with workers(worker), api_server() as server:
        await server.stop()
        async with watching(server, tmp_path) as harness:
            assert (await harness.chat()).status == 503
            server.put(pod_of(worker, "agg-0"))
            await server.start()
            await until(lambda: ready(harness) == {worker.id})
            await server.stop()
            assert (await harness.chat()).body == ANSWER


def test_only_one_of_etcd_and_kubernetes_names_workers() -> None:
    tables = {"etcd": {"endpoints": ["http://127.0.0.1:1"]}, "kubernetes": {"selector": "a=b"}}
    with pytest.raises(ConfigError, match=r"both name workers: keep one"):
        build_config(RouterConfig, tables, source="x")
