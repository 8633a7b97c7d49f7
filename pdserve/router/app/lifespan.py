"""The parts of a router, opened and closed in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from pdserve.router.admission.gate import Gate
from pdserve.router.app.router import Router
from pdserve.router.app.routes import make_app
from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.discovery import DnsDiscovery, EtcdDiscovery, dns_names
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
    tracer = tracer or open_tracer(config.tracing, "pdserve-router")
    fleet, stats = Fleet.from_config(config), Stats()
    token = cluster_token(config.access)
    gate = Gate(config, fleet)
    tls = WorkerTls(config.tls)
    upstream = Upstream(config.limits, token, tls)
    prober = Prober(config.probe, fleet, upstream, Upstream(config.limits, token, tls), stats)
    discovery = _discovery(config, fleet, token)
    trace_file = TraceFile(Path(config.trace.file)) if config.trace.file else None
    tasks: list[asyncio.Task[None]] = []
    try:
        router = Router(config, fleet, gate, upstream, stats, make_app, tracer, trace_file)
        if discovery is not None:
            await discovery.first()
            tasks.append(asyncio.create_task(_keep_running("discovery", discovery.run, stats)))
        await prober.first_round(first)
        tasks.append(asyncio.create_task(_keep_running("probes", prober.run, stats)))
        yield router
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if discovery is not None:
            await discovery.close()
        await prober.close()
        gate.close()
        upstream.close()
        if trace_file is not None:
            await asyncio.to_thread(trace_file.close)
        if tracer is not None:
            await asyncio.to_thread(tracer.close)


def _discovery(config: RouterConfig, fleet: Fleet, token: str) -> DnsDiscovery | EtcdDiscovery | None:
    """Who names workers besides the configuration; None: nobody. Raises ConfigError."""
    if names := dns_names(config):
        return DnsDiscovery(names, fleet)
    return EtcdDiscovery(config.etcd, fleet, token) if config.etcd.endpoints else None


async def _keep_running(name: str, run: Callable[[], Awaitable[None]], stats: Stats) -> None:
    """Run it until cancelled. Without it, the router would go on with what it last knew of the workers."""
    while True:
        try:
            await run()
        except Exception:  # boundary: a background task, which nobody awaits
            logger.exception("%s failed by a fault of the router; they begin again in %g s", name, RESTART_S)
            stats.task_failures[name] += 1
        await asyncio.sleep(RESTART_S)
