"""The router's process: listening socket, event loop, uvicorn, graceful stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from functools import partial

import uvicorn
import uvloop

from pdserve.errors import ConfigError, StartupError
from pdserve.logs import configure_logs
from pdserve.router.admin.app import AdminApp
from pdserve.router.admin.live_feed import LiveFeed
from pdserve.router.app.generation import LAST_WORD_S
from pdserve.router.app.router import Router, open_router
from pdserve.router.config.router import RouterConfig
from pdserve.router.config.tenants import Access
from pdserve.router.fleet.health_check import FirstRound
from pdserve.router.processes.reload import stamp, take_over, watch_file
from pdserve.router.server.connection import ClientProtocol, Connections
from pdserve.settings.command_line import RESTARTED, ConfigSource

logger = logging.getLogger(__name__)

BACKLOG = 4096
LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
GC_THRESHOLD = (10_000, 20, 50)
"""A request makes some 200 objects and hardly a cycle: Python's own 700 would look for garbage every few."""


def run(config: RouterConfig, source: ConfigSource[RouterConfig] | None = None) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit status; raises ConfigError, StartupError."""
    configure_logging(config)
    if not (config.decode or config.agg or config.etcd.endpoints) and config.admin.port is None:
        raise ConfigError(
            "no workers: list 'decode' (and 'prefill') workers, or 'agg' workers, or set etcd.endpoints"
        )
    first = FirstRound(strict=RESTARTED not in os.environ)
    if config.processes > 1:
        from pdserve.router.processes.parent import run_processes

        run_processes(config, source, first)
    else:
        uvloop.run(_serve_alone(config, source, first))
    return 0


def configure_logging(config: RouterConfig) -> None:
    """The log of a router's process."""
    configure_logs(config.log_format, config.log_level, text_format=LOG_FORMAT)
    for noisy in ("httpx", "httpcore", "uvicorn.error", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


async def _serve_alone(
    config: RouterConfig, source: ConfigSource[RouterConfig] | None, first: FirstRound
) -> None:
    loop = asyncio.get_running_loop()
    seen = stamp(source.path) if source is not None else None
    with bind(config.host, config.port) as listening:
        async with _server(config, first) as (router, server):
            host, port = listening.getsockname()[:2]
            watching = None
            if source is not None:
                load = source.load

                def reload() -> None:
                    router.config = take_over(router.config, load, router.fleet)
                    try:
                        router.reload()
                    except ConfigError as error:
                        logger.error("the API keys are not changed: %s", error)  # noqa: TRY400 - one line

                loop.add_signal_handler(signal.SIGHUP, reload)
                if config.watch_config_s > 0:
                    every_s = config.watch_config_s
                    watching = asyncio.create_task(watch_file(source.path, every_s, reload, seen))
            logger.info(
                "listening on %s://%s:%d (%s; prefill %d, decode %d, agg %d workers)",
                "https" if server.config.is_ssl else "http",
                f"[{host}]" if ":" in host else host,
                port,
                config.mode,
                len(config.prefill),
                len(config.decode),
                len(config.agg),
            )
            async with administered(router, config):
                await serve_until_stopped(server, listening)
            if watching is not None:
                watching.cancel()
    logger.info("stopped")


def serve_child(
    config: RouterConfig,
    listening: socket.socket,
    channel: socket.socket,
    admin: socket.socket | None,
    first: FirstRound,
) -> None:
    """Serve as one of several processes, until SIGTERM or until the parent is gone. Raises StartupError."""
    from pdserve.router.processes.peer import Peers

    async def main() -> None:
        async with _server(config, first) as (router, server):
            peers = Peers(router, server)
            talking = asyncio.create_task(peers.run(channel))
            async with administered(router, config, admin) if admin else contextlib.nullcontext():
                await serve_until_stopped(server, listening)
            await peers.leave()
            talking.cancel()

    uvloop.run(main())


@contextlib.asynccontextmanager
async def _server(config: RouterConfig, first: FirstRound) -> AsyncIterator[tuple[Router, uvicorn.Server]]:
    """A router and its server, to be stopped by SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    async with open_router(config, first=first) as router:
        server = make_server(router, config, config.access)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, server.handle_exit, number, None)
        gc.freeze()  # what was made until now stays: the collector need not look at it again
        gc.set_threshold(*GC_THRESHOLD)
        yield router, server


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which ends the process by the signal after a graceful stop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.server_state: Connections = Connections()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish what runs."""
        self.server_state.is_stopping = True
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the signals to whoever runs the server."""
        yield


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
        feed = LiveFeed(router)
        server = make_server(AdminApp(router, feed), config)
        logger.info("admin API on port %d of %s", listening.getsockname()[1], config.admin.host)
        serving = asyncio.create_task(server.serve(sockets=[listening]), name="router-admin")
        feeding = asyncio.create_task(feed.run(), name="router-live")
        try:
            yield
        finally:
            feeding.cancel()
            server.should_exit = server.force_exit = True
            await serving


def make_server(application: object, config: RouterConfig, access: Access | None = None) -> uvicorn.Server:
    """uvicorn for this router: httptools, no access log, headers of our own only; TLS as `access` says.
    Raises ConfigError for a certificate that cannot be used.
    """
    access = access or Access()
    settings = uvicorn.Config(
        application,  # type: ignore[arg-type]  # our own, looser ASGI types
        http=partial(  # type: ignore[arg-type]  # a factory will do
            ClientProtocol,
            head_s=config.deadlines.head_s,
            hot=application.hot if isinstance(application, Router) else None,
        ),
        ws="none",
        lifespan="off",
        interface="asgi3",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=math.ceil(config.client_keepalive_s),
        timeout_graceful_shutdown=math.ceil(config.stop_grace_s),
        ssl_certfile=access.tls_cert_file,
        ssl_keyfile=access.tls_key_file,
    )
    try:
        settings.load()
    except OSError as error:  # ssl.SSLError too
        files = f"{access.tls_cert_file} and {access.tls_key_file}"
        raise ConfigError(f"access: no certificate and key can be had from {files}: {error}") from None
    return _Server(settings)


async def serve_until_stopped(server: uvicorn.Server, listening: socket.socket) -> None:
    """Serve until `server.should_exit`; then running requests have `stop_grace_s`, and a
    moment more for a last word."""
    await server.serve(sockets=[listening])
    if server.server_state.tasks:
        await asyncio.wait(server.server_state.tasks, timeout=LAST_WORD_S + 1.0)


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket; `shared`: one of several on the port. Raises StartupError when the address cannot
    be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartupError(f"cannot listen on {host}:{port}: {error}") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise StartupError(
            f"cannot listen on {host}:{port}: {error.strerror}; stop what uses the port, or choose another "
            "with --port"
        ) from None
    listening.setblocking(False)
    return listening
