"""TLS and bounds of a worker's HTTP server, which SGLang runs by uvicorn; and its Unix socket.

SGLang (0.5.23) reads certificates once and asks no client for one. A context of our own asks for one where it
should, and follows the files. SGLang gets the files as arguments too, so that it asks itself by https for a
first generation. It does so at an address that no certificate needs to name. So these requests verify
nothing; they hold no secret, and show the worker's own certificate.

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
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import uvicorn

from pdserve.crowd import Crowd
from pdserve.discovery.host_socket import BACKLOG, listen_here, new_name
from pdserve.engine.http.bounded_heads import BoundedHeads
from pdserve.open_files import raise_open_files
from pdserve.sglang_places import places
from pdserve.tls.contexts import Certificates, TlsConfig

PLACES: Final = places(
    "sglang.srt.entrypoints.http_server",
    "_setup_and_run_http_server uses uvicorn, Server, Config",
    "_execute_server_warmup uses requests",
    "_freeze_gc_after_server_warmup uses requests",
)


logger = logging.getLogger(__name__)


class _TwoListeners(uvicorn.Server):
    """uvicorn's server, which also listens on a Unix socket. `on_listening` is told its name."""

    def __init__(self, config: uvicorn.Config, *, on_listening: Callable[[str], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on both. A Unix socket that cannot be had only costs routers more."""
        await super().startup(sockets)
        config = self.config
        name = new_name(self.servers[0].sockets[0].getsockname()[1])

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
            return
        loop = asyncio.get_running_loop()
        self.servers.append(await loop.create_unix_server(connected, sock=listening, backlog=BACKLOG))
        self._on_listening(name)


@contextlib.contextmanager
def serving(
    http_server: ModuleType,
    tls: TlsConfig,
    certificates: Certificates,
    on_listening: Callable[[str], None] = lambda _name: None,
) -> Iterator[None]:
    """While the block runs, SGLang's server (`http_server`, its module) has bounded heads, and speaks TLS
    where `tls` says so. `on_listening` is told the name of its Unix socket, where it has one.
    """
    context = certificates.lasting_server_context()
    names = vars(http_server)
    before = {"uvicorn": names["uvicorn"], "requests": names["requests"]}
    names["uvicorn"] = _configured(before["uvicorn"], context, on_listening)
    if context is not None:
        # of SGLang's requests to itself, see above; each would be told of
        warnings.filterwarnings("ignore", message="Unverified HTTPS request")
        names["requests"] = _showing(before["requests"], tls)
    try:
        yield
    finally:
        names.update(before)


def _configured(
    module: ModuleType, context: ssl.SSLContext | None, on_listening: Callable[[str], None]
) -> SimpleNamespace:
    """uvicorn's module, whose servers have bounded heads, and use `context` if there is one, or else have a
    Unix socket, too.
    """
    files = raise_open_files()  # half of them for SGLang and the pool
    crowd: Crowd[BoundedHeads] = Crowd(math.inf if files is None else files // 2)
    more: dict[str, Any] = {"http": functools.partial(BoundedHeads, crowd=crowd)}
    if context is not None:
        more["ssl_context_factory"] = lambda _config, _default: context
    named = {**vars(module), "Config": functools.partial(module.Config, **more)}
    if context is None:
        named["Server"] = functools.partial(_TwoListeners, on_listening=on_listening)
    return SimpleNamespace(**named)


def _showing(requests: ModuleType, tls: TlsConfig) -> SimpleNamespace:
    """The module, whose requests show the worker's certificate, to itself."""
    more: dict[str, Any] = {"verify": False, "cert": (str(tls.certificate), str(tls.key))}

    def asking(ask: Any) -> Any:
        return lambda *words, **options: ask(*words, **{**options, **more})

    own = {"get": asking(requests.get), "post": asking(requests.post)}
    return SimpleNamespace(**{**vars(requests), **own})
