"""The router's process: listening socket, event loop, uvicorn, graceful stop."""

from __future__ import annotations

import gc
import logging
import math
import socket

import uvicorn
import uvloop

from pdserve.errors import StartupError
from pdserve.router.app import open_router
from pdserve.router.config import RouterConfig

logger = logging.getLogger(__name__)

BACKLOG = 4096


def run(config: RouterConfig) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit status; raises ConfigError, StartupError."""
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)-7s %(name)s: %(message)s"
    )
    for noisy in ("httpx", "httpcore", "uvicorn.error", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    uvloop.run(_serve(config))
    return 0


async def _serve(config: RouterConfig) -> None:
    if not (config.decode or config.agg):
        raise StartupError("no workers: list 'decode' (and 'prefill') workers, or 'agg' workers")
    with bind(config.host, config.port) as listening:
        async with open_router(config) as router:
            host, port = listening.getsockname()[:2]
            server = uvicorn.Server(uvicorn_config(router, config))
            logger.info(
                "listening on http://%s:%d (%s; prefill %d, decode %d, agg %d workers)",
                f"[{host}]" if ":" in host else host,
                port,
                config.mode,
                len(config.prefill),
                len(config.decode),
                len(config.agg),
            )
            gc.freeze()  # what was made until now stays: the collector need not look at it again
            await server.serve(sockets=[listening])
    logger.info("stopped")


def uvicorn_config(application: object, config: RouterConfig) -> uvicorn.Config:
    """uvicorn for this router: httptools, no access log, headers of our own only."""
    return uvicorn.Config(
        application,  # type: ignore[arg-type]  # our own, looser ASGI types
        http="httptools",
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
    )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises StartupError when the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartupError(f"cannot listen on {host}:{port}: {error}") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
