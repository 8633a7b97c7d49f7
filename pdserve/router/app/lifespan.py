"""The parts of a router, opened and closed in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path

from pdserve.router.admission.gate import Gate
from pdserve.router.app.router import Router
from pdserve.router.app.routes import make_app
from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.discovery import discovered
from pdserve.router.fleet.health_check import STRICT, FirstRound, Prober
from pdserve.router.fleet.registry import Fleet
from pdserve.router.http.tls import WorkerTls
from pdserve.router.http.worker_connection import Upstream
from pdserve.router.metrics.stats import Stats
from pdserve.router.request.traces import TraceFile
from pdserve.router.tenants.api_keys import cluster_token
from pdserve.tracing import Tracer, open_tracer

logger = logging.getLogger(__name__)

RESTART_S = 1.0


@asynccontextmanager
async def open_router(
    config: RouterConfig, tracer: Tracer | None = None, first: FirstRound = STRICT
) -> AsyncIterator[Router]:
    """A running router: connections, probes, application. `tracer` replaces the configured one. Raises
    ConfigError, StartupError; `first` says whether for workers that do not fit together.
    """
    token, tls = cluster_token(config.access), WorkerTls(config.tls)
    fleet, stats = Fleet.from_config(config), Stats()
    async with AsyncExitStack() as stack:
        if tracer := tracer or open_tracer(config.tracing, "pdserve-router"):
            stack.push_async_callback(asyncio.to_thread, tracer.close)
        trace_file = TraceFile(Path(config.trace.file)) if config.trace.file else None
        if trace_file is not None:
            stack.push_async_callback(asyncio.to_thread, trace_file.close)
        to_workers = config.limits, token, tls
        upstream = stack.enter_context(closing(Upstream(*to_workers, config.deadlines.connect_s)))
        gate = stack.enter_context(closing(Gate(config, fleet)))
        prober = Prober(config.probe, fleet, upstream, Upstream(*to_workers, config.probe.timeout_s), stats)
        stack.push_async_callback(prober.close)
        follow = await stack.enter_async_context(discovered(config, fleet, token))
        router = Router(config, fleet, gate, upstream, stats, make_app, tracer, trace_file)
        tasks: list[asyncio.Task[None]] = []
        stack.push_async_callback(_end, tasks)
        if follow is not None:
            tasks.append(asyncio.create_task(_keep_running("discovery", follow, stats)))
        await prober.first_round(first)
        tasks.append(asyncio.create_task(_keep_running("probes", prober.run, stats)))
        yield router


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _keep_running(name: str, run: Callable[[], Awaitable[None]], stats: Stats) -> None:
    """Run it until cancelled. Without it, the router would go on with what it last knew of the workers."""
    while True:
        try:
            await run()
        except Exception:  # boundary: a background task, which nobody awaits
            logger.exception("%s failed by a fault of the router; they begin again in %g s", name, RESTART_S)
            stats.task_failures[name] += 1
        await asyncio.sleep(RESTART_S)
