"""A router process: it serves on the sockets that its parent holds, until the parent or a signal ends it.

SIGTERM     `/ready` says 503 for `stop_notice_s`; then as SIGINT
SIGINT      no new connections; running requests have `stop_grace_s`
SIGUSR1     another process has taken its place: no new connections; running requests have all their time
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import shutil
import signal

import uvicorn
import uvloop

from pdserve.errors import StartupError
from pdserve.resources.memory import raise_open_files
from pdserve.router.admin.app import AdminApp
from pdserve.router.app.lifespan import open_router
from pdserve.router.app.router import Router
from pdserve.router.fleet.health_check import FirstRound
from pdserve.router.fleet.membership import after_reload
from pdserve.router.http.serving import make_server, public_tls, serve_until_stopped
from pdserve.router.sharing.files import ActsFile, MetricsFiles, ids_of
from pdserve.router.sharing.fork import READY, REPLACED, Setup, Sockets
from pdserve.router.sharing.member import Member
from pdserve.security.tls import Certificates

logger = logging.getLogger(__name__)

GC_THRESHOLD = (10_000, 20, 50)
"""A request makes some 200 objects and hardly a cycle: Python's own 700 would look for garbage every few."""
START_POLL_S = 0.01


def serve(setup: Setup, sockets: Sockets) -> None:
    """Until the parent or a signal ends it. Raises ConfigError, StartupError."""
    uvloop.run(_Child(setup, sockets).run())


class _Child:
    def __init__(self, setup: Setup, sockets: Sockets) -> None:
        self._setup = setup
        self._sockets = sockets
        self._config = setup.config
        self._router: Router
        self._server: uvicorn.Server
        self._is_orphan = False

    async def run(self) -> None:
        """Raises ConfigError, StartupError."""
        setup, directory = self._setup, self._setup.directory
        acts = ActsFile(directory)
        noted = acts.read()
        orders = noted.orders
        if setup.listed_before is not None:
            orders = after_reload(orders, setup.listed_before, ids_of(setup.config))
        first = FirstRound(setup.is_strict, MetricsFiles(directory).refused(), orders)
        most_files = raise_open_files()
        async with open_router(self._config, first=first) as router:
            self._router = router
            most = math.inf if most_files is None else most_files // 2  # the rest is for workers
            tls = public_tls(self._config.access)
            self._server = make_server(router, self._config, tls, router.proxy, most)
            try:
                member = Member(router, directory, setup.name, acts, noted.keys)
            except OSError as error:
                raise StartupError(f"the runtime directory {directory} cannot be used: {error}") from None
            try:
                await member.settle()
                await self._serve()
            finally:
                await member.close()
        if self._is_orphan:
            shutil.rmtree(directory, ignore_errors=True)

    async def _serve(self) -> None:
        admin, loop = self._admin(), asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._give_notice)
        loop.add_signal_handler(signal.SIGINT, self._stop, self._config.stop_grace_s)
        loop.add_signal_handler(REPLACED, self._stop, self._config.deadlines.total_s)
        gc.freeze()  # what was made until now stays: the collector need not look at it again
        gc.set_threshold(*GC_THRESHOLD)
        talking = asyncio.create_task(self._talk())
        administering = asyncio.create_task(self._administer(admin))
        try:
            await serve_until_stopped(self._server, self._sockets.listening)
        finally:
            for task in (talking, administering):
                task.cancel()
            await asyncio.gather(talking, administering, return_exceptions=True)

    async def _talk(self) -> None:
        """Say when this process serves; stop when the parent is gone."""
        loop, line = asyncio.get_running_loop(), self._sockets.line
        line.setblocking(False)
        while not self._server.started:  # noqa: ASYNC110 - uvicorn tells nobody
            await asyncio.sleep(START_POLL_S)
        try:
            await loop.sock_sendall(line, READY)
            await loop.sock_recv(line, 1)
        except OSError:
            pass
        self._is_orphan = True
        if not self._server.should_exit:
            logger.warning("the parent process is gone")
            self._stop(self._config.stop_grace_s)

    def _give_notice(self) -> None:
        if not self._router.is_stopping:
            self._router.is_stopping = True
            notice_s = self._config.stop_notice_s
            asyncio.get_running_loop().call_later(notice_s, self._stop, self._config.stop_grace_s)

    def _stop(self, grace_s: float) -> None:
        """No new connections from now on, and `grace_s` for what runs; a second time, for what still does."""
        server = self._server
        if not server.should_exit:
            server.config.timeout_graceful_shutdown = math.ceil(grace_s)
            server.should_exit = True
        elif grace_s < (server.config.timeout_graceful_shutdown or 0):
            asyncio.get_running_loop().call_later(grace_s, self._cut_off)

    def _cut_off(self) -> None:
        for task in list(self._server.server_state.tasks):
            task.cancel()

    def _admin(self) -> uvicorn.Server:
        """The admin API. Raises ConfigError."""
        tls = Certificates(self._config.admin.tls).lasting_server_context()
        return make_server(AdminApp(self._router), self._config, tls)

    async def _administer(self, server: uvicorn.Server) -> None:
        """Serve the admin API, where this process has it."""
        if (listening := self._sockets.admin) is None:
            return
        serving = asyncio.create_task(server.serve(sockets=[listening]), name="router-admin")
        try:
            await asyncio.shield(serving)
        finally:
            server.should_exit = server.force_exit = True
            await serving
