"""The router's parent process: it holds the sockets, and starts, replaces and stops the processes that serve.

A router of one process has a parent too, so there is one life and one reload. Every child has its own
listening socket on the port. With SO_REUSEPORT the kernel spreads connections over these sockets. The parent
holds all sockets for as long as it serves, so replacing a child refuses and resets no connection: a successor
starts on the same socket, and only when it serves is the old child told to stop. It finishes the requests
that it has, in all the time that these may take.

- SIGHUP: the parent reads the configuration again and starts successors with it, one after the other. When
  all of them serve, they take the children's places. When one does not start, no child is replaced.
- A child that dies is started again after a pause, which doubles while children die young.
- SIGTERM is passed on: see `child`. A second one, and SIGINT, stop without notice. What a child has after
  `stop_grace_s` is cut off, and the child killed if it does not end.
- Children tell each other what they have to (`gossip`, `files`). Of them the parent knows whether they serve.

A child ends when the line to its parent closes, so it never outlives its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Final

from pdserve.errors import ConfigError, PdserveError, StartupError
from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.membership import after_reload
from pdserve.router.http.listening import LAST_WORD_S, bind
from pdserve.router.sharing.files import Acts, ActsFile, MetricsFiles, ids_of
from pdserve.router.sharing.fork import READY, REPLACED, Setup, exit_status, start_child
from pdserve.settings.command_line import ConfigSource

logger = logging.getLogger(__name__)

READY_TIMEOUT_S: Final = 60.0
STOP_SLACK_S: Final = LAST_WORD_S + 4.0
"""On top of what a child has to stop in, until it is killed."""
RESTART_S: Final = 1.0
MAX_RESTART_S: Final = 30.0
OLD_S: Final = 60.0
"""A child that has served for so long did not die young."""
MAX_REPLACED: Final = 4
"""Times the number of processes: of more that finish their last requests the oldest are stopped."""
NAME_BYTES: Final = 4
FIXED: Final = ("host", "port", "processes", "admin")
"""Options that the sockets are made of."""


class ChildFailed(StartupError):
    """A child could not start, and has said why."""

    def __init__(self, status: int) -> None:
        super().__init__("a router process did not start; its last words are above")
        self.status = status


class Child:
    """A process that serves, or is about to."""

    def __init__(self, setup: Setup, listening: socket.socket, admin: socket.socket | None) -> None:
        """Raises StartupError."""
        self.setup = setup
        self.is_ready = asyncio.Event()
        self.is_stopping = False
        try:
            self.pid, line = start_child(setup, listening, admin)
        except OSError as error:
            raise StartupError(f"no router process can be started: {error}") from None
        self.ended = asyncio.create_task(self._live(line))
        """Its exit status."""

    async def ready(self) -> None:
        """Wait until it serves. Raises ChildFailed when it ends, or takes too long."""
        waiting = asyncio.create_task(self.is_ready.wait())
        try:
            await asyncio.wait(
                {waiting, self.ended}, timeout=READY_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            waiting.cancel()
        if not self.is_ready.is_set():
            raise ChildFailed(self.ended.result() if self.ended.done() else 1)

    def tell(self, number: signal.Signals) -> None:
        """Send a signal; one that does not serve yet ends by it."""
        self.is_stopping = True
        self.send(number if self.is_ready.is_set() else signal.SIGTERM)

    async def kill_after(self, grace_s: float) -> None:
        """Kill it when it takes longer to end than that."""
        await asyncio.wait({self.ended}, timeout=grace_s)
        if not self.ended.done():
            logger.warning("router process %d does not end, it is killed", self.pid)
            await self.kill()

    async def kill(self) -> None:
        """End it at once."""
        self.send(signal.SIGKILL)
        await asyncio.wait({self.ended})

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it lives."""
        if not self.ended.done():  # else its id may be another's
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def _live(self, line: socket.socket) -> int:
        loop = asyncio.get_running_loop()
        with line, contextlib.suppress(OSError):
            while said := await loop.sock_recv(line, 1):  # it closes when the child ends
                if said == READY:
                    self.is_ready.set()
        return await exit_status(self.pid)


class Prefork:
    """Starts, replaces and stops children until it is stopped itself."""

    def __init__(
        self, config: RouterConfig, source: ConfigSource[RouterConfig] | None, *, is_strict: bool
    ) -> None:
        """`is_strict`: do not start with listed workers that do not fit together."""
        self._config = config
        self._source = source
        self._is_strict = is_strict
        self._directory: Path
        self._sockets: list[socket.socket] = []
        self._admin: socket.socket | None = None
        """Of the admin API, which the first child serves."""
        self._children: list[Child] = []
        """By place: the index of the child's socket."""
        self._live: list[Child] = []
        """Also the children that start or stop, the oldest first."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop_signal = signal.SIGTERM
        self._stopped = asyncio.Event()
        self._reload = asyncio.Event()

    async def run(self) -> None:
        """Until SIGTERM or SIGINT. Raises StartupError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload.set)
        try:
            self._directory = Path(tempfile.mkdtemp(prefix="pdserve-router-"))
            held = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise StartupError(f"the router has no runtime directory: {error}") from None
        try:
            fcntl.flock(held, fcntl.LOCK_SH)  # else systemd-tmpfiles would remove what is some days old
            await self._start_all()
            self._later(self._reloading())
            await self._stopped.wait()
        finally:
            await self._stop()
            shutil.rmtree(self._directory, ignore_errors=True)
            os.close(held)

    async def _start_all(self) -> None:
        config, port = self._config, self._config.port
        for _ in range(config.processes):
            listening = bind(config.host, port, shared=config.processes > 1)
            self._sockets.append(listening)
            port = listening.getsockname()[1]
        if config.admin.port is not None:
            self._admin = bind(config.admin.host, config.admin.port)
        for place in range(config.processes):
            self._children.append(self._start(place, is_strict=self._is_strict))
        ready = asyncio.create_task(self._all_ready())
        stopped = asyncio.create_task(self._stopped.wait())
        await asyncio.wait((ready, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not ready.done():  # a signal came first
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)
            return
        ready.result()
        for place, child in enumerate(self._children):
            self._later(self._keep(place, child, RESTART_S))
        self._say_where()

    async def _all_ready(self) -> None:
        await asyncio.gather(*(child.ready() for child in self._children))

    def _say_where(self) -> None:
        config = self._config
        host, port = self._sockets[0].getsockname()[:2]
        logger.info(
            "listening on %s://%s:%d (prefill %d, decode %d, agg %d, elastic %d workers%s)",
            "https" if config.access.tls_cert_file else "http",
            f"[{host}]" if ":" in host else host,
            port,
            len(config.prefill),
            len(config.decode),
            len(config.agg),
            len(config.elastic),
            f"; {config.processes} processes" if config.processes > 1 else "",
        )
        if self._admin is not None:
            logger.info("admin API on port %d of %s", self._admin.getsockname()[1], config.admin.host)

    def _on_stop(self, number: signal.Signals) -> None:
        if self._stopped.is_set() or number == signal.SIGINT:
            self._stop_signal = signal.SIGINT
            for child in self._live:
                child.tell(signal.SIGINT)
        self._stopped.set()

    def _start(
        self,
        place: int,
        config: RouterConfig | None = None,
        listed_before: frozenset[str] | None = None,
        *,
        is_strict: bool = False,
    ) -> Child:
        """Raises StartupError."""
        name = f"{time.time_ns():020x}-{secrets.token_hex(NAME_BYTES)}"  # the oldest one's comes first
        setup = Setup(name, config or self._config, self._directory, listed_before, is_strict)
        child = Child(setup, self._sockets[place], self._admin if place == 0 else None)
        self._live.append(child)
        child.ended.add_done_callback(lambda _: self._ended(child))
        return child

    def _ended(self, child: Child) -> None:
        self._live.remove(child)
        try:
            MetricsFiles(self._directory).fold(child.setup.name)
        except OSError as error:
            logger.error("what a router process has counted is lost: %s", error)  # noqa: TRY400 - one line

    async def _keep(self, place: int, child: Child, pause_s: float) -> None:
        """Start another when the child has died, unless its place is another's by then."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            await child.ready()
        except ChildFailed:
            await child.kill()
        status = await asyncio.shield(child.ended)
        if child.is_stopping:
            return
        if loop.time() - started_s > OLD_S:
            pause_s = RESTART_S
        logger.error("router process %d ended with status %d, it is started again", child.pid, status)
        await asyncio.sleep(pause_s)
        while self._children[place] is child:
            pause_s = min(2 * pause_s, MAX_RESTART_S)
            try:
                new = self._children[place] = self._start(place)
                self._later(self._keep(place, new, pause_s))
            except StartupError as error:
                logger.error("%s; it is tried again", error)  # noqa: TRY400 - one line
                await asyncio.sleep(pause_s)

    async def _reloading(self) -> None:
        while True:
            await self._reload.wait()
            self._reload.clear()
            try:
                await self._replace_all()
            except PdserveError as error:
                logger.error("the configuration is not changed: %s", error)  # noqa: TRY400 - one line

    async def _replace_all(self) -> None:
        """Every child by a new one with the configuration as it is now, or none. Raises PdserveError."""
        if self._source is None:
            return
        config, before = self._source.load(), self._config
        config.check_workers()
        for name in FIXED:
            if getattr(config, name) != getattr(before, name):
                raise ConfigError(f"a change of '{name}' needs a restart of the router")
        started: list[Child] = []
        try:
            for place in range(len(self._sockets)):
                started.append(self._start(place, config, ids_of(before)))
                await started[-1].ready()
        except StartupError:
            for child in started:
                child.tell(signal.SIGINT)
                self._later(child.kill_after(config.stop_grace_s + STOP_SLACK_S))
            raise

        def pruned(acts: Acts) -> Acts:
            return Acts(after_reload(acts.orders, ids_of(before), ids_of(config)), acts.keys)

        replaced, self._children, self._config = self._children, started, config
        try:
            ActsFile(self._directory).change(pruned)
        except OSError as error:
            logger.error("what administrators did before may count again: %s", error)  # noqa: TRY400 - one line
        for place, child in enumerate(started):
            self._later(self._keep(place, child, RESTART_S))
        self._replace(replaced)
        logger.info("all router processes have the new configuration")

    def _replace(self, children: list[Child]) -> None:
        """Let them finish what they have. If there are too many that do, the oldest have `stop_grace_s`."""
        for child in children:
            child.tell(REPLACED)
            self._later(child.kill_after(child.setup.config.deadlines.total_s + STOP_SLACK_S))
        stopping = [child for child in self._live if child.is_stopping]
        for child in stopping[: -MAX_REPLACED * len(self._sockets)]:
            child.tell(signal.SIGINT)
            self._later(child.kill_after(child.setup.config.stop_grace_s + STOP_SLACK_S))

    async def _stop(self) -> None:
        self._stopped.set()
        await self._cancel_tasks()  # from here on nobody is started, and all that live are stopped here
        for listening in (*self._sockets, *filter(None, (self._admin,))):
            listening.close()  # else it would be open after the children's end, and nobody would serve it
        for child in self._live:
            child.tell(self._stop_signal)
        config = self._config
        grace_s = config.stop_notice_s + config.stop_grace_s + STOP_SLACK_S
        await asyncio.gather(*(child.kill_after(grace_s) for child in self._live))
        await self._cancel_tasks()

    async def _cancel_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _later(self, what: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def run_router(config: RouterConfig, source: ConfigSource[RouterConfig] | None, *, is_strict: bool) -> None:
    """Run `config.processes` router processes until they are stopped. Raises StartupError; `is_strict` says
    whether for workers that do not fit together.
    """

    async def main() -> None:
        await Prefork(config, source, is_strict=is_strict).run()

    asyncio.run(main())
    logger.info("stopped")
