"""Several router processes behind one port: a parent that starts, replaces and stops its children.

One child as its parent has it (see `parent`).

Several router processes behind one port: a parent that starts, replaces and stops its children.

Every child has its own listening socket on the port. With SO_REUSEPORT the kernel spreads connections over
these sockets. The parent holds all sockets for as long as it lives, so replacing a child refuses and resets
no connection: a successor starts on the same socket, and only when it serves is the old child told to stop.
The old child finishes the requests that it has.

- SIGHUP: the parent reads the configuration again and starts successors with it, one after the other. When
  all of them serve, they take the children's places. When one does not start, no child is replaced.
- A child that dies is started again after a pause.
- SIGTERM, SIGINT: every child finishes what it has within `stop_grace_s`.
- Metrics: a child that is asked asks the parent, which asks all children and adds up. The sum includes the
  counters of ended children and the number of silent children. The admin API reports from this sum.
- Limits of tenants hold over all children, see `agreement`.
- Changes of the fleet by the admin API of one child are sent to the others. A child that starts later begins
  with them. A reload of the API keys is sent, too.

A child ends when its socket pair with the parent closes, so it never outlives its parent.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import signal
import socket
from collections.abc import Callable, Coroutine
from multiprocessing.context import SpawnProcess
from typing import NamedTuple, assert_never

from pdserve.errors import ConfigError, PdserveError, StartupError
from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.changes import Changes, FleetChange
from pdserve.router.fleet.health_check import FirstRound
from pdserve.router.fleet.registry import listed_workers
from pdserve.router.fleet.worker import Worker
from pdserve.router.http.serving import LAST_WORD_S, bind
from pdserve.router.metrics.stats import Snapshot, add_up, left_behind
from pdserve.router.processes.channel import (
    COLLECT_TIMEOUT_S,
    FROM_CHILD,
    Channel,
    ChannelClosed,
    Collect,
    Collected,
    FromChild,
    FromParent,
    Last,
    LimitsTold,
    Ready,
    Refused,
    Reload,
    Stopping,
)
from pdserve.router.processes.serving import run_child
from pdserve.settings.command_line import ConfigSource

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 60.0
STOP_SLACK_S = LAST_WORD_S + 3.0
"""On top of `stop_grace_s`, until a child is killed."""
_spawn = multiprocessing.get_context("spawn")
_numbers = itertools.count()


class Setup(NamedTuple):
    """What children are made of."""

    config: RouterConfig
    changes: Changes


class Child:
    """One process and the parent's end of its channel."""

    def __init__(
        self,
        setup: Setup,
        listening: socket.socket,
        admin: socket.socket | None,
        on_message: Callable[[Child, FromChild], None],
        first: FirstRound,
    ) -> None:
        """Raises StartupError."""
        self.number = next(_numbers)
        self.setup = setup
        self.is_ready = asyncio.Event()
        self.is_stopping = False
        self.metrics = Snapshot()
        """As it has sent them last."""
        self.has_left = False
        """It has sent its `Last`: these metrics are final."""
        self.channel = Channel[FromChild](FROM_CHILD, lambda message: on_message(self, message))
        self.process, ours = _started(setup.config, listening, admin, first)
        self.serving = asyncio.create_task(self.channel.run(ours))
        self.ended = asyncio.create_task(self._until_ended())
        """Its exit status."""

    async def ready(self) -> None:
        """Wait until it serves. Raises StartupError when it ends, or takes too long."""
        waiting = asyncio.create_task(self.is_ready.wait())
        try:
            await asyncio.wait(
                {waiting, self.serving}, timeout=READY_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            waiting.cancel()
        if not self.is_ready.is_set():
            raise StartupError("a router process did not start; its last words are above")

    async def ask_metrics(self) -> bool:
        """Renew `metrics`, if it serves. False if it does not answer in time: `metrics` stays as it was."""
        if self.is_ready.is_set() and not self.has_left:
            try:
                self.metrics = await self.channel.collect(COLLECT_TIMEOUT_S)
            except ChannelClosed:
                return self.has_left
        return True

    async def stop(self) -> None:
        """Let it finish what it has; kill it when that takes longer than `stop_grace_s`."""
        if not self.is_stopping and not self.ended.done():
            self.process.terminate()
        self.is_stopping = True
        await asyncio.wait({self.ended}, timeout=self.setup.config.stop_grace_s + STOP_SLACK_S)
        if not self.ended.done():
            logger.warning("router process %s does not end, it is killed", self.process.pid)
            await self.kill()

    async def kill(self) -> None:
        """End it at once."""
        if not self.ended.done():
            self.process.kill()
        await asyncio.wait({self.ended})

    async def _until_ended(self) -> int:
        await asyncio.wait({self.serving})  # its end of the channel closes when it ends
        await asyncio.to_thread(self.process.join)
        return self.process.exitcode or 0


def _started(
    config: RouterConfig, listening: socket.socket, admin: socket.socket | None, first: FirstRound
) -> tuple[SpawnProcess, socket.socket]:
    """The process and our end of its channel. Raises StartupError."""
    try:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = _spawn.Process(
                    target=run_child, args=(config, listening, theirs, admin, first), daemon=False
                )
                process.start()
            except OSError:
                ours.close()
                raise
    except OSError as error:
        raise StartupError(f"no router process can be started: {error}") from None
    ours.setblocking(False)
    return process, ours


RESTART_PAUSE_S = 1.0


class Parent:
    """Starts, replaces and stops children until it is stopped itself."""

    def __init__(
        self, config: RouterConfig, source: ConfigSource[RouterConfig] | None, first: FirstRound
    ) -> None:
        self._setup = Setup(config, Changes())
        self._coming: Setup | None = None
        """Of the successors that are starting now."""
        self._source = source
        self._first = first
        self._refused: frozenset[str] = frozenset()
        """Ids of workers that the children refuse, by their newest message."""
        self._sockets: list[socket.socket] = []
        self._admin: socket.socket | None = None
        """Of the admin API, which the first child serves."""
        self._children: list[Child] = []
        """By place: the index of the child's socket."""
        self._live: set[Child] = set()
        """Also the children that start or stop."""
        self._ended_metrics = Snapshot()
        """Counters of ended children."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = asyncio.Event()
        self._is_stopping = False
        """Notice of the end was given."""
        self._reload = asyncio.Event()

    async def run(self) -> None:
        """Until SIGTERM or SIGINT. Raises StartupError."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._stopped.set)
        loop.add_signal_handler(signal.SIGTERM, self._give_notice)
        loop.add_signal_handler(signal.SIGHUP, self._reload.set)
        config = self._setup.config
        port = config.port
        try:
            for _ in range(config.processes):
                listening = bind(config.host, port, shared=True)
                self._sockets.append(listening)
                port = listening.getsockname()[1]
            if config.admin.port is not None:
                self._admin = bind(config.admin.host, config.admin.port)
            places = range(config.processes)
            self._children = [self._start(place, self._setup, self._first) for place in places]
            await asyncio.gather(*(child.ready() for child in self._children))
            for place, child in enumerate(self._children):
                self._later(self._keep(place, child))
            logger.info("listening on http://%s:%d with %d processes", config.host, port, config.processes)
            self._later(self._reloading())
            await self._stopped.wait()
        finally:
            await self._stop()

    def _give_notice(self) -> None:
        """SIGTERM: have `/ready` say that this is the end, and stop later. A second one stops at once."""
        notice_s = self._setup.config.stop_notice_s
        if self._is_stopping or notice_s <= 0:
            self._stopped.set()
            return
        self._is_stopping = True
        for child in self._live:
            child.channel.send(Stopping())
        asyncio.get_running_loop().call_later(notice_s, self._stopped.set)

    def _start(self, place: int, setup: Setup, first: FirstRound | None = None) -> Child:
        """Raises StartupError."""
        first = first or FirstRound(strict=False, refused=self._refused, changes=tuple(setup.changes))
        admin = self._admin if place == 0 else None
        child = Child(setup, self._sockets[place], admin, self._on_message, first)
        self._live.add(child)
        child.ended.add_done_callback(lambda _: self._ended(child))
        return child

    async def _keep(self, place: int, child: Child) -> None:
        """Start another when the child has died, unless its place is another's by then."""
        try:
            await child.ready()
        except StartupError:
            await child.kill()
        status = await asyncio.shield(child.ended)
        if child.is_stopping:
            return
        logger.error("router process %s ended with status %d, it is started again", child.process.pid, status)
        await asyncio.sleep(RESTART_PAUSE_S)
        while self._children[place] is child:
            try:
                new = self._children[place] = self._start(place, self._setup)
                self._later(self._keep(place, new))
            except StartupError as error:
                logger.error("%s; it is tried again", error)  # noqa: TRY400 - one line
                await asyncio.sleep(RESTART_PAUSE_S)

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
        config, before = self._source.load(), self._setup.config
        config.check_workers()
        for name in ("host", "port", "processes", "admin"):
            if getattr(config, name) != getattr(before, name):
                raise ConfigError(f"a change of '{name}' needs a restart of the router")
        coming = Setup(config, self._setup.changes.configured(_ids(before), _ids(config)))
        started: list[Child] = []
        self._coming = coming
        try:
            for place in range(len(self._sockets)):
                started.append(self._start(place, coming))
                await started[-1].ready()
        except StartupError:
            for child in started:
                self._later(child.stop())
            raise
        finally:
            self._coming = None
        replaced, self._children, self._setup = self._children, started, coming
        for old in replaced:
            self._later(old.stop())
        for place, child in enumerate(started):
            self._later(self._keep(place, child))
        logger.info("all router processes have the new configuration")

    def _on_message(self, child: Child, message: FromChild) -> None:
        match message:
            case Ready():
                child.is_ready.set()
                if self._is_stopping:
                    child.channel.send(Stopping())
            case Collect():
                self._later(self._collect(child, message))
            case Last():
                child.metrics, child.has_left = message.metrics, True
            case LimitsTold():
                for each in self._live:
                    each.channel.send(message)
            case FleetChange():
                for setup in filter(None, (self._setup, self._coming)):
                    setup.changes.note(message)
                if message.act != "gone":
                    self._send_others(child, message)
            case Refused():
                self._refused = message.workers
            case Reload():
                self._send_others(child, message)
            case _:
                assert_never(message)

    def _ended(self, child: Child) -> None:
        self._live.discard(child)
        self._ended_metrics = add_up((self._ended_metrics, left_behind(child.metrics)))

    def _send_others(self, child: Child, message: FromParent) -> None:
        for other in self._live - {child}:
            other.channel.send(message)

    async def _collect(self, child: Child, asked: Collect) -> None:
        answered = await asyncio.gather(*(other.ask_metrics() for other in self._live))
        silent = Snapshot({"processes_silent": {(): answered.count(False)}})
        known = (self._ended_metrics, *(other.metrics for other in self._live), silent)  # all of one moment
        child.channel.send(Collected(asked.number, add_up(known)))

    async def _stop(self) -> None:
        self._stopped.set()
        await self._cancel_tasks()  # from here on nobody is started, and all that live are stopped here
        for listening in self._sockets:
            listening.close()
        if self._admin is not None:
            self._admin.close()
        await asyncio.gather(*(child.stop() for child in self._live))
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


def _ids(config: RouterConfig) -> set[str]:
    return {Worker(role, url).id for url, role in listed_workers(config).items()}


def run_processes(config: RouterConfig, source: ConfigSource[RouterConfig] | None, first: FirstRound) -> None:
    """Run `config.processes` router processes until they are stopped. Raises StartupError; `first` says
    whether for workers that do not fit together.
    """

    async def main() -> None:
        await Parent(config, source, first).run()

    asyncio.run(main())
    logger.info("stopped")
