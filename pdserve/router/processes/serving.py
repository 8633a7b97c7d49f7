"""The life of a serving process: alone, or as one of several; taking over a changed configuration.

Taking over a changed configuration in a running router.

The life of a serving process: alone, or as one of several.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable

import msgspec
import uvicorn
import uvloop

from pdserve.errors import ConfigError, PdserveError
from pdserve.logs import configure_logs
from pdserve.open_files import raise_open_files
from pdserve.router.admin.app import AdminApp
from pdserve.router.app.lifespan import open_router
from pdserve.router.app.router import Router
from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.health_check import FirstRound
from pdserve.router.fleet.registry import Fleet, listed_workers
from pdserve.router.processes.agreement import shared_limits
from pdserve.router.processes.peer import Peer
from pdserve.router.server.uvicorn_server import bind, make_server, public_tls, serve_until_stopped
from pdserve.security.tls import Certificates
from pdserve.settings.command_line import ConfigSource

logger = logging.getLogger(__name__)

TAKEN_OVER = ("prefill", "decode", "agg", "elastic", "tenants", "tenant_defaults", "admission", "aliases")
"""The workers here, the rest by `Gate.configure`."""


def take_over(before: RouterConfig, load: Callable[[], RouterConfig], fleet: Fleet) -> RouterConfig:
    """The lists of workers as the configuration has them now; of what else changed, the log says that it
    needs a restart. A configuration that cannot be used changes nothing.
    """
    try:
        config = load()
        config.check_workers()
        joined, left = fleet.members.sync("config", listed_workers(config))
    except PdserveError as error:
        logger.error("the configuration is not changed: %s", error)  # noqa: TRY400 - one line
        return before
    names = (
        [f"{worker.role} {worker.id}" for worker in joined],
        [f"{worker.role} {worker.id}" for worker in left],
    )
    logger.info(
        "configuration read again: joined: %s; left: %s", *(", ".join(some) or "none" for some in names)
    )
    waiting = [name for name in changed_options(before, config) if name not in TAKEN_OVER]
    if waiting:
        logger.warning("changed, and taken over at the next start only: %s", ", ".join(waiting))
    return config


def changed_options(before: RouterConfig, after: RouterConfig) -> list[str]:
    """Names of the options (of the tables, for options within one) that differ."""
    names = (field.name for field in msgspec.structs.fields(RouterConfig))
    return [name for name in names if getattr(before, name) != getattr(after, name)]


LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
GC_THRESHOLD = (10_000, 20, 50)
"""A request makes some 200 objects and hardly a cycle: Python's own 700 would look for garbage every few."""


def configure_logging(config: RouterConfig) -> None:
    """The log of a router's process."""
    configure_logs(config.log_format, config.log_level, text_format=LOG_FORMAT)
    for noisy in ("httpx", "httpcore", "uvicorn.error", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def serve_alone(config: RouterConfig, source: ConfigSource[RouterConfig] | None, first: FirstRound) -> None:
    """Serve in this process until SIGINT or SIGTERM. Raises ConfigError, StartupError."""
    uvloop.run(_serve_alone(config, source, first))


async def _serve_alone(
    config: RouterConfig, source: ConfigSource[RouterConfig] | None, first: FirstRound
) -> None:
    loop = asyncio.get_running_loop()
    with bind(config.host, config.port) as listening:
        async with _server(config, first, config.stop_notice_s) as (router, server):
            host, port = listening.getsockname()[:2]
            if source is not None:
                load = source.load

                def reload() -> None:
                    router.config = take_over(router.config, load, router.fleet)
                    try:
                        router.reload()
                    except ConfigError as error:
                        logger.error("the API keys are not changed: %s", error)  # noqa: TRY400 - one line

                loop.add_signal_handler(signal.SIGHUP, reload)
            logger.info(
                "listening on %s://%s:%d (%s; prefill %d, decode %d, agg %d, elastic %d workers)",
                "https" if server.config.is_ssl else "http",
                f"[{host}]" if ":" in host else host,
                port,
                config.mode,
                len(config.prefill),
                len(config.decode),
                len(config.agg),
                len(config.elastic),
            )
            async with administered(router, config):
                await serve_until_stopped(server, listening)
    logger.info("stopped")


def serve_child(
    config: RouterConfig,
    listening: socket.socket,
    channel: socket.socket,
    admin: socket.socket | None,
    first: FirstRound,
) -> None:
    """Serve as one of several processes, until SIGTERM or until the parent is gone. Raises StartupError."""

    async def main() -> None:
        async with _server(config, first, 0.0) as (router, server):  # the parent gives the notice
            peer = Peer(router, server)
            talking = asyncio.create_task(peer.run(channel))
            async with administered(router, config, admin) if admin else contextlib.nullcontext():
                await serve_until_stopped(server, listening)
            await peer.leave()
            talking.cancel()

    uvloop.run(main())


def _stop(router: Router, server: uvicorn.Server, notice_s: float) -> None:
    """SIGTERM: `/ready` says that this is the end, `notice_s` before it. A second one stops at once."""
    if router.is_stopping or notice_s <= 0:
        server.handle_exit(signal.SIGTERM, None)
        return
    router.is_stopping = True
    asyncio.get_running_loop().call_later(notice_s, server.handle_exit, signal.SIGTERM, None)


@contextlib.asynccontextmanager
async def _server(
    config: RouterConfig, first: FirstRound, notice_s: float
) -> AsyncIterator[tuple[Router, uvicorn.Server]]:
    """A router and its server, to be stopped by SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    most_files = raise_open_files()
    async with open_router(config, first=first) as router, shared_limits(router):
        most = math.inf if most_files is None else most_files // 2  # the rest is for workers
        server = make_server(router, config, public_tls(config.access), router.generation, most)
        loop.add_signal_handler(signal.SIGINT, server.handle_exit, signal.SIGINT, None)
        loop.add_signal_handler(signal.SIGTERM, _stop, router, server, notice_s)
        gc.freeze()  # what was made until now stays: the collector need not look at it again
        gc.set_threshold(*GC_THRESHOLD)
        yield router, server


@contextlib.asynccontextmanager
async def administered(
    router: Router, config: RouterConfig, given: socket.socket | None = None
) -> AsyncIterator[None]:
    """The admin API, where there is one, as long as the block runs; on a socket of its own, or on the `given`
    one. Raises StartupError.
    """
    if config.admin.port is None:
        yield
        return
    with given or bind(config.admin.host, config.admin.port) as listening:
        tls = Certificates(config.admin.tls).lasting_server_context()
        server = make_server(AdminApp(router), config, tls)
        logger.info("admin API on port %d of %s", listening.getsockname()[1], config.admin.host)
        serving = asyncio.create_task(server.serve(sockets=[listening]), name="router-admin")
        try:
            yield
        finally:
            server.should_exit = server.force_exit = True
            await serving


def run_child(
    config: RouterConfig,
    listening: socket.socket,
    channel: socket.socket,
    admin: socket.socket | None,
    first: FirstRound,
) -> None:
    """A child's whole life."""
    configure_logging(config)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a terminal's goes to all; the parent's is what counts
    try:
        serve_child(config, listening, channel, admin, first)
    except PdserveError as error:
        sys.stderr.write(f"pdserve router: error: {error}\n")
        sys.exit(2 if isinstance(error, ConfigError) else 1)
