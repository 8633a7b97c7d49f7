"""TLS and bounds of a worker's HTTP server, which SGLang runs by uvicorn; and its Unix socket.

SGLang (0.5.23) reads certificates once and asks no client for one. A context of our own asks for one where
it should, and follows the files. The server listens on sockets that were bound before anything slow, so
that another process cannot take the port while the model loads.

Without TLS the server also listens on a Unix socket (`pdserve.discovery.host_socket`). With TLS it does not,
since nobody would show a certificate there.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import socket
import ssl
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import uvicorn

from pdserve.discovery.host_socket import BACKLOG, listen_here, new_name
from pdserve.engine.http.bounded_heads import BoundedHeads
from pdserve.open_files import raise_open_files
from pdserve.security.connection_limits import ConnectionLimit
from pdserve.security.tls import Certificates
from pdserve.sglang_places import places

PLACES: Final = places(
    "sglang.srt.entrypoints.http_server",
    "_setup_and_run_http_server uses uvicorn, Server, Config",
)


logger = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """uvicorn's server on sockets that are bound already. Without TLS it also listens on a Unix socket.
    `on_listening` is called in its event loop with the name of that; empty: there is none.
    """

    def __init__(
        self, config: uvicorn.Config, *, bound: list[socket.socket], on_listening: Callable[[str], None]
    ) -> None:
        super().__init__(config)
        self._bound = bound
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on all. A Unix socket that cannot be had only costs routers more."""
        for one in self._bound:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # see `bind_address`
        await super().startup(self._bound)
        self._on_listening("" if self.config.is_ssl else await self._listen_here())

    async def _listen_here(self) -> str:
        config = self.config
        name = new_name(self._bound[0].getsockname()[1])

        def connected() -> asyncio.Protocol:
            made: Any = config.http_protocol_class
            protocol: asyncio.Protocol = made(
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return protocol

        try:
            listening = listen_here(name)
        except OSError as error:
            logger.warning("no Unix socket for routers of this host: %s", error)
            return ""
        loop = asyncio.get_running_loop()
        self.servers.append(await loop.create_unix_server(connected, sock=listening, backlog=BACKLOG))
        return name


@contextlib.contextmanager
def serving(
    http_server: ModuleType,
    certificates: Certificates,
    bound: list[socket.socket],
    on_listening: Callable[[str], None] = lambda _name: None,
) -> Iterator[None]:
    """While the block runs, SGLang's server (`http_server`, its module) takes connections of the sockets
    `bound`, has bounded heads, and speaks TLS where there are certificates. `on_listening`: see `_Server`.
    """
    before = http_server.uvicorn
    http_server.uvicorn = _configured(before, certificates.lasting_server_context(), bound, on_listening)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        http_server.uvicorn = before  # type: ignore[attr-defined]


def _configured(
    module: ModuleType,
    context: ssl.SSLContext | None,
    bound: list[socket.socket],
    on_listening: Callable[[str], None],
) -> SimpleNamespace:
    """uvicorn's module, whose servers have bounded heads and use `context` if there is one."""
    files = raise_open_files()  # half of them for SGLang and the pool
    connection_limit: ConnectionLimit[BoundedHeads] = ConnectionLimit(
        math.inf if files is None else files // 2
    )
    more: dict[str, Any] = {"http": functools.partial(BoundedHeads, connection_limit=connection_limit)}
    if context is not None:
        more["ssl_context_factory"] = lambda _config, _default: context
    ours = {
        "Config": functools.partial(module.Config, **more),
        "Server": functools.partial(_Server, bound=bound, on_listening=on_listening),
    }
    return SimpleNamespace(**{**vars(module), **ours})
