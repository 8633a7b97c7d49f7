"""Of the router: its prefix table, plans, health checks and discovery, with growing numbers of workers.

Half of the workers prefill and half answer. Health checks are the prober's own, answered by this process: so
their figure is the least that they cost.
"""

from __future__ import annotations

import asyncio
import base64
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Final

import httpx
import msgspec
import psutil

from benchmarks.scale.figure import Figure
from pdserve.discovery.config import EtcdConfig
from pdserve.discovery.etcd import RENEWALS
from pdserve.router.api.endpoints import ENDPOINTS
from pdserve.router.config.limits import Limits, Probe
from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.health_check import Prober
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Role, Worker, WorkerInfo, WorkerLoad
from pdserve.router.metrics.stats import Stats
from pdserve.router.placement.placer import Placer
from pdserve.router.placement.prefix_index import CAPACITY_BLOCKS, MAX_PLACES, Prefix, PrefixTable
from pdserve.router.placement.request_facts import RequestFacts
from pdserve.router.upstream.client import Upstream

MODEL: Final = "m"
PLANS: Final = 200
JOINED: Final = 10
PROBED: Final = 200
PROBE_ROUNDS: Final = 5
PROMPT_BLOCKS: Final = 32
SEEN_S: Final = 1000.0


def url(number: int) -> str:
    """Of a worker."""
    return f"http://10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}:30000"


def role(number: int) -> Role:
    """Half of each."""
    return "decode" if number % 2 else "prefill"


def router_figures(workers: int) -> Iterator[Figure]:
    """All figures of so many workers."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield Figure("prefix_mb", workers, process.submit(prefix_bytes, workers).result() / 1e6)
    config = RouterConfig(
        prefill=tuple(url(i) for i in range(workers) if role(i) == "prefill"),
        decode=tuple(url(i) for i in range(workers) if role(i) == "decode"),
    )
    fleet = Fleet.from_config(config)
    yield Figure("join_s", workers, _joined_s(fleet))
    yield Figure("plan_ms", workers, 1e3 * _plan_s(config, fleet))
    yield Figure("probe_cores", workers, asyncio.run(_probe_s(fleet)) * workers / Probe().interval_s)
    yield Figure("etcd_list_mb", workers, workers * _etcd_entry_bytes() / 1e6)
    yield Figure("etcd_renewals", workers, workers * RENEWALS / EtcdConfig().lease_s)


def prefix_bytes(workers: int) -> int:
    """Memory of a full table whose blocks have been at as many workers as one remembers: the worst case."""
    table = PrefixTable()
    places = [Worker(role(i), url(i)) for i in range(min(workers, MAX_PLACES))]
    process = psutil.Process()
    before = process.memory_info().rss
    for first in range(0, CAPACITY_BLOCKS, PROMPT_BLOCKS):
        prefix = Prefix(tuple((first + i) * 0x9E37_79B9_7F4A_7C15 % (1 << 64) for i in range(PROMPT_BLOCKS)))
        for seen, worker in enumerate(places):
            table.record(prefix, worker, SEEN_S + seen, in_pool=True)
    return int(process.memory_info().rss - before)


def _joined_s(fleet: Fleet) -> float:
    """For all to join. What each costs grows with those that are there: the last ones are measured, and the
    mean join costs half of that.
    """
    workers, last = fleet.workers, fleet.workers[-JOINED:]
    for worker in workers:
        worker.info = WorkerInfo(worker.role, MODEL)
        fleet.on_load(worker, WorkerLoad(max_running_requests=16), pool_up=True)
        fleet.on_probe_ready(worker)
    began_s = time.thread_time()
    for worker in last:
        fleet.on_info(worker, WorkerInfo(worker.role, MODEL))
    return (time.thread_time() - began_s) / len(last) * len(workers) / 2


def _plan_s(config: RouterConfig, fleet: Fleet) -> float:
    """Median time of a plan for a prompt that some workers know."""
    placer = Placer(config, fleet)
    prefix = Prefix(tuple(range(1, PROMPT_BLOCKS + 1)))
    for seen, worker in enumerate(fleet.workers[:MAX_PLACES]):
        placer.prefixes.record(prefix, worker, SEEN_S + seen, in_pool=True)
    times = []
    for turn in range(PLANS):
        facts = RequestFacts(
            ENDPOINTS["/v1/completions"], prompt_tokens_estimate=20_000, turn=turn, prefix=prefix
        )
        began_s = time.thread_time()
        placer.plan(facts, fleet.snapshot(MODEL, SEEN_S), None, SEEN_S + MAX_PLACES)
        times.append(time.thread_time() - began_s)
    return statistics.median(times)


async def _probe_s(fleet: Fleet) -> float:
    """Processor time of one check of a worker that is ready."""
    load = {"running_requests": 4, "waiting_requests": 0, "queued_tokens": 0, "max_running_requests": 16}
    ready = msgspec.json.encode({"ready": True, "draining": False, "pool": "up", "load": load})
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=ready))
    prober = Prober(Probe(), fleet, Upstream(Limits()), Stats(), transport)
    workers = fleet.workers[:PROBED]
    began_s = time.process_time()
    for _ in range(PROBE_ROUNDS):
        await asyncio.gather(*(prober.probe(worker, asks_info=False) for worker in workers))
    taken_s = time.process_time() - began_s
    await prober.close()
    return taken_s / (PROBE_ROUNDS * len(workers))


def _etcd_entry_bytes() -> int:
    """Of a worker's key and value in the answer to a list, as its JSON gateway writes them."""
    value = msgspec.json.encode({"address": url(1), "weight": 1, "signature": "0" * 64})
    key = f"/pdserve/pool/workers/{role(1)}/{url(1).removeprefix('http://')}".encode()
    entry = {
        "key": base64.b64encode(key).decode(),
        "create_revision": "1000000",
        "mod_revision": "1000000",
        "version": "1",
        "value": base64.b64encode(value).decode(),
        "lease": "7587869000000000000",
    }
    return len(msgspec.json.encode(entry)) + 1
