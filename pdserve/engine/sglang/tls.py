"""TLS and bounds of a worker's HTTP server, which SGLang runs by uvicorn.

SGLang (0.5.23) reads certificates once and asks no client for one. A context of our own asks for one where
it should, and follows the files. The server listens on sockets that were bound before anything slow, so
that another process cannot take the port while the model loads.
"""

from __future__ import annotations

import contextlib
import functools
import math
import socket
import ssl
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import uvicorn

from pdserve.engine.http.bounded_heads import BoundedHeads
from pdserve.resources.memory import raise_open_files
from pdserve.security.connection_limits import ConnectionLimit
from pdserve.security.tls import Certificates


class _Server(uvicorn.Server):
    """uvicorn's server on sockets that are bound already. `on_listening` is called in its event loop."""

    def __init__(
        self, config: uvicorn.Config, *, bound: list[socket.socket], on_listening: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._bound = bound
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on all."""
        for one in self._bound:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # see `bind_address`
        await super().startup(self._bound)
        self._on_listening()


@contextlib.contextmanager
def serving(
    http_server: ModuleType,
    certificates: Certificates,
    bound: list[socket.socket],
    on_listening: Callable[[], None] = lambda: None,
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
    on_listening: Callable[[], None],
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
