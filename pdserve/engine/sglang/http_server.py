"""A worker's HTTP server: uvicorn's, with SGLang's FastAPI app.

SGLang's own (0.5.23, `_setup_and_run_http_server`) binds its port once the model is loaded, reads
certificates once, asks no client for one, and bounds neither heads nor connections. Here the server listens
on sockets that were bound before anything slow, so that another process cannot take the port while the model
loads. What the app's lifespan needs is set as SGLang sets it.

Its connections have bounds: uvicorn's own would take endless headers, as slow as one likes, and thousands of
requests at once, from clients that have shown no token.
"""

from __future__ import annotations

import asyncio
import functools
import math
import socket
from collections.abc import Callable, Coroutine
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pdserve.resources.memory import raise_open_files
from pdserve.security.connection_limits import ConnectionLimit
from pdserve.security.tls import Certificates

MAX_HEAD_BYTES: Final = 64 * 1024  # as the router has
MAX_HEADERS: Final = 256
MAX_PIPELINED: Final = 16
"""Requests that wait for the answer before theirs; each takes some kilobytes. Routers send none."""
HEAD_S: Final = 30.0
"""Time for a head from its first byte, and from a connection's start to its first head's end."""
_TOO_LONG: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)


class BoundedHeads(HttpToolsProtocol):
    """Answers a head that is too long with 431, and closes a connection whose head is too slow, or that sends
    too many requests at once. Beyond the bound of `connection_limit`, connections go that wait for no answer.
    """

    def __init__(
        self, *args: Any, connection_limit: ConnectionLimit[BoundedHeads] | None = None, **kwargs: Any
    ) -> None:
        """`connection_limit`: all connections of the server."""
        super().__init__(*args, **kwargs)
        self._connection_limit = ConnectionLimit(math.inf) if connection_limit is None else connection_limit
        self._head_bytes = 0  # received since the last head ended, or -1 while a body comes
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        super().connection_made(transport)
        self._limit_time()
        goes = self._connection_limit.came(self, self.client[0] if self.client else "", BoundedHeads._is_idle)
        if goes is not None:
            goes.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._unlimit_time()
        self._connection_limit.left(self)
        super().connection_lost(exc)

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if self.transport.is_closing():
            return
        if self._head_bytes >= 0:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers or ()) > MAX_HEADERS:
            self._refuse()

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._limit_time()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header line; those beyond the bound are not kept."""
        if len(self.headers) <= MAX_HEADERS:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete."""
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.close()
        if self.transport.is_closing():
            return  # with the rest of what was read at once
        self._head_bytes = -1
        self._unlimit_time()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is complete."""
        self._head_bytes = 0
        super().on_message_complete()

    def _refuse(self) -> None:
        self.headers = []
        if not self.transport.is_closing():
            self.transport.write(_TOO_LONG)
            self.transport.close()

    def _limit_time(self) -> None:
        self._unlimit_time()
        self._timer = self.loop.call_later(HEAD_S, self._too_slow)

    def _unlimit_time(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self.headers = []
        self.transport.close()


class HttpServer(uvicorn.Server):
    """Serves `app` on sockets that are bound already. `first` runs beside it once it takes connections."""

    def __init__(
        self,
        app: Any,
        certificates: Certificates,
        bound: list[socket.socket],
        first: Callable[[], Coroutine[Any, Any, None]] | None = None,
        **settings: Any,
    ) -> None:
        """`settings`: of `uvicorn.Config`, the files of certificates too: by them uvicorn knows that it is to
        speak TLS.
        """
        files = raise_open_files()  # half of them for SGLang and the pool
        limit: ConnectionLimit[BoundedHeads] = ConnectionLimit(math.inf if files is None else files // 2)
        if (context := certificates.lasting_server_context()) is not None:
            settings["ssl_context_factory"] = lambda _config, _default: context
        http: Any = functools.partial(BoundedHeads, connection_limit=limit)
        super().__init__(uvicorn.Config(app, loop="uvloop", http=http, **settings))
        self._bound = bound
        self._first = first
        self._beside: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on all."""
        for one in self._bound:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # see `bind_address`
        await super().startup(self._bound)
        if self._first is not None:
            self._beside = asyncio.create_task(self._first())

    def stop(self) -> None:
        """Take no more connections, and end. Called in the event loop."""
        self.should_exit = True


def sglang_server(
    server_args: Any,
    launched: tuple[Any, Any, Any, Any, Any, Any],
    certificates: Certificates,
    bound: list[socket.socket],
    first: Callable[[], Coroutine[Any, Any, None]],
) -> HttpServer:
    """The server of SGLang's app; `launched`: what SGLang's `_launch_subprocesses` has given."""
    from sglang.srt.entrypoints import http_server as theirs
    from sglang.srt.environ import envs
    from sglang.srt.utils import set_uvicorn_logging_configs

    manager, templates, _, ranks, watchdog, _ = launched
    theirs.set_global_state(theirs._GlobalState(manager, templates, ranks.scheduler_infos[0]))
    manager._subprocess_watchdog = watchdog
    app = theirs.app
    app.is_single_tokenizer_mode, app.server_args = True, server_args
    # the thread that the lifespan starts asks for nothing and ends
    app.warmup_thread_kwargs = {"server_args": server_args, "execute_warmup_func": lambda _args: False}
    set_uvicorn_logging_configs(server_args)
    server = HttpServer(
        app,
        certificates,
        bound,
        first,
        root_path=server_args.fastapi_root_path,
        log_level=server_args.log_level_http or server_args.log_level,
        timeout_keep_alive=envs.SGLANG_TIMEOUT_KEEP_ALIVE.get(),
        ssl_certfile=server_args.ssl_certfile,
        ssl_keyfile=server_args.ssl_keyfile,
    )
    manager.set_server_stop_hook(server.stop)
    return server
