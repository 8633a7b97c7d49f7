"""A pool node as a process: its signals, its open files, and the program before it, if there was one."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import threading
from collections.abc import Callable
from types import FrameType

import msgspec
import uvloop

from pdserve.errors import StartupError
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.kvpool.node.node import MAX_UNGREETED, PoolNode
from pdserve.kvpool.node.upgrade.handover import (
    ENDING,
    Handover,
    Succession,
    hold_signals,
    received,
    replace_process,
)
from pdserve.kvpool.node.upgrade.upgrader import check_start
from pdserve.kvpool.protocol.address import parse_address


def run_node(config: PoolNodeConfig) -> None:
    """Run a node in this process until SIGTERM or SIGINT. Raises StartupError, ConfigError."""
    for address in config.listen:
        parse_address(address)
    raise_open_files(config.name, config.max_connections, config.max_connections + MAX_UNGREETED)
    succession = received()
    if succession is not None:
        found = check_start(config) if succession.stands_in else None
        _load(succession, config)
        if not succession.await_turn(msgspec.json.encode(found).decode()):
            return
    end = _End()
    for number in ENDING:
        signal.signal(number, end)
    hold_signals(hold=False)
    handover = uvloop.run(_run(config, succession, end))
    if handover is not None:
        replace_process(handover)


class _End:
    """Handles what is to end this process, from before its loop runs until the next program is executed.

    The main thread holds signals back for the next program, but another may take them. Then they are sent to
    the main thread again, which keeps them: what is pending outlives `exec`.
    """

    def __init__(self) -> None:
        self._told = False
        self._stop: Callable[[], object] = lambda: None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal has come."""
        if number in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
            signal.pthread_kill(threading.get_ident(), number)
            return
        self._told = True
        self._stop()

    def ends(self, node: PoolNode) -> None:
        """A node that this is to stop, in the running loop; as soon as it serves, if it has come already."""
        loop = asyncio.get_running_loop()

        def stop() -> None:
            with contextlib.suppress(RuntimeError):  # it is closed, so the node has ended
                loop.call_soon_threadsafe(node.stop)

        self._stop = stop
        if self._told:
            stop()


def _load(succession: Succession, config: PoolNodeConfig) -> None:
    """What the node will need at once, and is loaded late otherwise."""
    if config.metrics:
        import pdserve.kvpool.node.metrics.server  # noqa: F401
    if succession.handover.ucx:
        from pdserve.kvpool.transports.ucx import UcxLibrary

        with contextlib.suppress(StartupError):  # the node will say so
            UcxLibrary()


async def _run(config: PoolNodeConfig, succession: Succession | None, end: _End) -> Handover | None:
    node = PoolNode(config, succession)
    end.ends(node)
    # what was made until then stays: the collector would take 20 ms to look at the index of a million pages
    await node.serve(gc.freeze)
    return node.handover


logger = logging.getLogger(__name__)


OTHER_FILES = 64  # that a node has open beside its sockets


def raise_open_files(name: str, max_connections: int, sockets: int) -> None:
    """Let this process open as many files as it may; say so where that is too few for `sockets`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed = sockets + OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        logger.warning(
            "node %s: max_connections = %d needs %d open files, this process may have %d: raise the limit "
            "(ulimit -Hn, LimitNOFILE=, --ulimit nofile=), or lower max_connections",
            name,
            max_connections,
            needed,
            hard,
        )
