"""Several router processes behind one port: a parent that starts, replaces and stops them.

Every child has a listening socket of its own on the port (SO_REUSEPORT: the kernel spreads connections over
them). The parent holds all of these sockets for as long as it lives. So a child is replaced without a
connection refused or reset: its successor is started on the same socket, and only when that one serves is the
old child told to stop, to finish what it has.

- SIGHUP: the configuration is read again, and every child replaced, one after the other, by one with it.
- A child that dies is started again, after a pause.
- SIGTERM, SIGINT: every child finishes what it has, within `stop_grace_s`.
- Metrics: the child that is asked asks the parent, which asks all and adds up.
- Limits of tenants hold over all of them, see `shares`.
- What the admin API of one child does to the fleet, the parent tells the others, and those started later;
  that it reads the API keys anew, it tells the others.

A child ends when its parent is gone, for whatever reason: its end of their socket pair says so.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from multiprocessing.context import SpawnProcess

from pdserve.command import ConfigSource
from pdserve.errors import ConfigError, PdserveError, StartupError
from pdserve.router.changes import Changes, FleetChange
from pdserve.router.channel import Channel, Collect, Collected, Message, Ready, Reload, Shared, Wants
from pdserve.router.config import RouterConfig
from pdserve.router.hot import LAST_WORD_S
from pdserve.router.reload import watch_file
from pdserve.router.serve import bind, configure_logging, serve_child
from pdserve.router.shares import Divider, Shares
from pdserve.router.sums import add_up

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 60.0
RESTART_PAUSE_S = 1.0
STOP_SLACK_S = LAST_WORD_S + 3.0
"""On top of `stop_grace_s`, until a child is killed."""
_spawn = multiprocessing.get_context("spawn")
_numbers = itertools.count()


class Child:
    """One process and the parent's end of its channel."""

    def __init__(
        self,
        config: RouterConfig,
        listening: socket.socket,
        admin: socket.socket | None,
        on_message: Callable[[Child, Message], None],
    ) -> None:
        self.number = next(_numbers)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.is_ready = asyncio.Event()
        self.is_stopping = False
        self.channel = Channel(lambda message: on_message(self, message))
        self.process: SpawnProcess = _spawn.Process(
            target=run_child, args=(config, listening, theirs, admin), daemon=False
        )
        self.process.start()
        theirs.close()
        self.serving = asyncio.create_task(self.channel.run(ours))

    async def ready(self) -> None:
        """Until it serves. Raises StartupError when it ends, or takes too long."""
        waiting = asyncio.create_task(self.is_ready.wait())
        await asyncio.wait(
            {waiting, self.serving}, timeout=READY_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
        )
        waiting.cancel()
        if not self.is_ready.is_set():
            raise StartupError("a router process did not start; its last words are above")

    async def ended(self) -> int:
        """Its exit status, once it has ended."""
        await asyncio.wait({self.serving})  # its end of the channel closes when it ends
        return await asyncio.to_thread(self._join)

    async def stop(self, grace_s: float) -> None:
        """Let it finish what it has, and kill it when that takes longer than `grace_s`."""
        self.is_stopping = True
        if self.process.is_alive():
            self.process.terminate()
        await asyncio.wait({self.serving}, timeout=grace_s)
        if not self.serving.done():
            logger.warning("router process %s does not end, it is killed", self.process.pid)
            self.process.kill()
        await self.ended()

    def _join(self) -> int:
        self.process.join()
        return self.process.exitcode or 0


class Processes:
    """The parent."""

    def __init__(self, config: RouterConfig, source: ConfigSource[RouterConfig] | None) -> None:
        self._config = config
        self._source = source
        self._sockets: list[socket.socket] = []
        self._admin: socket.socket | None = None
        """The admin API's; the first child serves it."""
        self._children: list[Child] = []
        self._live: set[Child] = set()
        """Those that start or stop, too."""
        self._changes = Changes()
        self._divider = Divider()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = asyncio.Event()
        self._reload = asyncio.Event()

    async def run(self) -> None:
        """Until SIGTERM or SIGINT. Raises StartupError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopped.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload.set)
        port = self._config.port
        try:
            for _ in range(self._config.processes):
                listening = bind(self._config.host, port, shared=True)
                self._sockets.append(listening)
                port = listening.getsockname()[1]
            if self._config.admin.port is not None:
                self._admin = bind(self._config.admin.host, self._config.admin.port)
            self._children = [self._start(listening) for listening in self._sockets]
            await asyncio.gather(*(child.ready() for child in self._children))
            for slot in range(len(self._children)):
                self._later(self._keep(slot))
            logger.info(
                "listening on http://%s:%d with %d processes", self._config.host, port, len(self._children)
            )
            self._later(self._reloading())
            if self._source is not None and self._config.watch_config_s > 0:
                self._later(watch_file(self._source.path, self._config.watch_config_s, self._reload.set))
            await self._stopped.wait()
        finally:
            await self._stop()

    def _start(self, listening: socket.socket) -> Child:
        admin = self._admin if listening is self._sockets[0] else None
        child = Child(self._config, listening, admin, self._on_message)
        self._live.add(child)
        child.serving.add_done_callback(lambda _: self._ended(child))
        return child

    async def _keep(self, slot: int) -> None:
        """Start the slot's child again whenever it dies."""
        while not self._stopped.is_set():
            child = self._children[slot]
            status = await child.ended()
            if child.is_stopping:  # its successor is there, or none is wanted
                if self._children[slot] is child:
                    return
                continue
            logger.error(
                "router process %s ended with status %d, it is started again", child.process.pid, status
            )
            await asyncio.sleep(RESTART_PAUSE_S)
            if self._children[slot] is child and not self._stopped.is_set():
                self._children[slot] = self._start(self._sockets[slot])

    async def _reloading(self) -> None:
        while True:
            await self._reload.wait()
            self._reload.clear()
            try:
                await self._replace_all()
            except PdserveError as error:
                logger.error("the configuration is not changed: %s", error)  # noqa: TRY400 - one line

    async def _replace_all(self) -> None:
        """Every child by a new one with the configuration as it is now. Raises PdserveError."""
        if self._source is None:
            return
        config, before = self._source.load(), self._config
        for name in ("host", "port", "processes", "admin"):
            if getattr(config, name) != getattr(before, name):
                raise ConfigError(f"a change of '{name}' needs a restart of the router")
        self._config = config
        self._changes.configured()
        for slot, listening in enumerate(self._sockets):
            old, new = self._children[slot], self._start(listening)
            try:
                await new.ready()
            except StartupError:
                self._config = before
                await new.stop(STOP_SLACK_S)
                raise
            self._children[slot] = new
            self._later(old.stop(before.stop_grace_s + STOP_SLACK_S))
        logger.info("all router processes have the new configuration")

    def _on_message(self, child: Child, message: Message) -> None:
        if isinstance(message, Ready):
            child.is_ready.set()
            for change in self._changes:
                child.channel.send(change)
        elif isinstance(message, Collect):
            self._later(self._collect(child, message.number))
        elif isinstance(message, Wants):
            self._share(self._divider.told(child.number, message.tenants))
        elif isinstance(message, FleetChange):
            self._changes.note(message)
            self._tell_others(child, message)
        elif isinstance(message, Reload):
            self._tell_others(child, message)

    def _ended(self, child: Child) -> None:
        self._live.discard(child)
        self._share(self._divider.gone(child.number))

    def _share(self, shares: Shares) -> None:
        for child in self._live:
            if child.number in shares:
                child.channel.send(Shared(shares[child.number]))

    def _tell_others(self, child: Child, message: Message) -> None:
        for other in self._live - {child}:
            other.channel.send(message)

    async def _collect(self, child: Child, number: int) -> None:
        found = await asyncio.gather(
            *(other.channel.collect() for other in self._children), return_exceptions=True
        )
        texts = [text for text in found if isinstance(text, str)]
        child.channel.send(Collected(number, add_up(texts).decode()))

    async def _stop(self) -> None:
        self._stopped.set()
        for listening in self._sockets:
            listening.close()
        if self._admin is not None:
            self._admin.close()
        grace_s = self._config.stop_grace_s + STOP_SLACK_S
        await asyncio.gather(*(child.stop(grace_s) for child in self._children))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _later(self, what: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def run_processes(config: RouterConfig, source: ConfigSource[RouterConfig] | None) -> None:
    """Run `config.processes` router processes until they are stopped. Raises StartupError."""

    async def main() -> None:
        await Processes(config, source).run()

    asyncio.run(main())
    logger.info("stopped")


def run_child(
    config: RouterConfig, listening: socket.socket, channel: socket.socket, admin: socket.socket | None
) -> None:
    """A child's whole life."""
    configure_logging(config)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a terminal's goes to all; the parent's is what counts
    try:
        serve_child(config, listening, channel, admin)
    except PdserveError as error:
        sys.stderr.write(f"pdserve router: error: {error}\n")
        sys.exit(2 if isinstance(error, ConfigError) else 1)
