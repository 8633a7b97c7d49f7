"""uvicorn as the router configures it, and its graceful stop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import Iterator

import uvicorn

from pdserve.errors import ConfigError
from pdserve.router.config.router import RouterConfig
from pdserve.router.config.tenants import Access
from pdserve.router.http.asgi import Application, Asgi
from pdserve.router.http.client_connection import ClientConnection
from pdserve.router.http.connections import Connections, Proxied
from pdserve.router.http.listening import BACKLOG, LAST_WORD_S
from pdserve.security.tls import Certificates, TlsConfig


class _Server(uvicorn.Server):
    """uvicorn with connections of our own. Its signal handling is left out: it ends the process by the signal
    after a graceful stop.
    """

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self.server_state: Connections = connections

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish what runs."""
        self.server_state.is_stopping = True
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second; the date is another one each second."""
        is_over = await super().on_tick(counter)
        state = self.server_state
        if counter % 10 == 0:
            state.default_lines = b"".join(b"%b: %b\r\n" % pair for pair in state.default_headers)
        return is_over

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the signals to whoever runs the server."""
        yield


def make_server(
    application: Asgi,
    config: RouterConfig,
    tls: ssl.SSLContext | None = None,
    proxied: Proxied | None = None,
    most_connections: float = math.inf,
) -> uvicorn.Server:
    """A server for this router: no access log, headers of our own only. `proxied` serves its paths past ASGI.
    `most_connections`: beyond it, those are closed that wait for no answer.
    """
    connections = Connections(
        Application(application),
        proxied,
        keep_alive_s=math.ceil(config.client_keepalive_s),
        head_s=config.deadlines.head_s,
        client_read_s=config.deadlines.client_read_s,
        most=most_connections,
    )

    def connection(*, _loop: asyncio.AbstractEventLoop | None, **_of_uvicorn: object) -> ClientConnection:
        return ClientConnection(connections, _loop or asyncio.get_running_loop())

    settings = uvicorn.Config(
        application,
        http=connection,  # type: ignore[arg-type]  # a factory will do
        ws="none",
        lifespan="off",
        interface="asgi3",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=math.ceil(config.stop_grace_s),
        ssl_context_factory=None if tls is None else lambda _config, _default: tls,
    )
    settings.load()
    return _Server(settings, connections)


def public_tls(access: Access) -> ssl.SSLContext | None:
    """TLS of the public port. Follows the files. Clients are not ours: they may speak TLS 1.2. Raises
    ConfigError.
    """
    files = TlsConfig(certificate=access.tls_cert_file, key=access.tls_key_file)
    try:
        return Certificates(files, oldest=ssl.TLSVersion.TLSv1_2).lasting_server_context()
    except ConfigError as error:
        names = f"{access.tls_cert_file} and {access.tls_key_file}"
        raise ConfigError(f"access: no certificate and key can be had from {names}: {error}") from None


async def serve_until_stopped(server: uvicorn.Server, listening: socket.socket) -> None:
    """Serve until `server.should_exit`; then running requests have `stop_grace_s`, and a
    moment more for a last word."""
    await server.serve(sockets=[listening])
    loop = asyncio.get_running_loop()
    end_s = loop.time() + LAST_WORD_S + 1.0
    while server.server_state.tasks and loop.time() < end_s:  # noqa: ASYNC110 - not all of them are tasks
        await asyncio.sleep(0.01)
