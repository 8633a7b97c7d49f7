"""A worker's HTTP server: uvicorn's, with SGLang's FastAPI app.

SGLang's own (0.5.23, `_setup_and_run_http_server`) binds its port once the model is loaded, reads
certificates once, asks no client for one, and bounds neither heads nor connections. Here the server listens
on sockets that were bound before anything slow, so that another process cannot take the port while the model
loads. What the app's lifespan needs is set as SGLang sets it.
"""

from __future__ import annotations

import asyncio
import functools
import math
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import uvicorn

from pdserve.engine.http.bounded_heads import BoundedHeads
from pdserve.resources.memory import raise_open_files
from pdserve.security.connection_limits import ConnectionLimit
from pdserve.security.tls import Certificates


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
