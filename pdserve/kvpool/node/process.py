"""A pool node as a process: its signals, its open files, its replacement by a new version."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

import uvloop

from pdserve.kvpool.node.admission import check_open, max_greeting, rules_of
from pdserve.kvpool.node.bootstrap import with_capacity
from pdserve.kvpool.node.config import PoolNodeConfig, with_secrets
from pdserve.kvpool.node.node import PoolNode
from pdserve.kvpool.node.upgrade.handover import (
    ENDING,
    Handover,
    hold_signals,
    received,
    replace_process,
)
from pdserve.kvpool.node.upgrade.upgrader import Start, check_start
from pdserve.kvpool.protocol.address import parse_address
from pdserve.resources.memory import raise_open_files


def run_node(config: PoolNodeConfig) -> None:
    """Run a node in this process until SIGTERM or SIGINT. SIGHUP upgrades a node that serves. Raises
    StartupError, ConfigError.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    config, missing = _checked(config)
    if missing:
        logger.warning("node %s: insecure, other hosts reach it: no %s", config.name, ", no ".join(missing))
    allow_open_files(
        config.name, config.max_connections, config.max_connections + max_greeting(config.max_connections)
    )
    inherited = received()
    end = _End(told=inherited is not None and inherited.ends)
    for number in ENDING:
        signal.signal(number, end)
    hold_signals(hold=False)
    sys.setswitchinterval(SWITCH_S)
    handover = uvloop.run(_run(config, inherited, end))
    if handover is not None:
        replace_process(handover)


def check_node(config: PoolNodeConfig) -> Start:
    """Which node would start on the pages that are in memory, with all of its modules loaded. Raises
    UpgradeError, StartupError, ConfigError.
    """
    config, _ = _checked(config)
    start = check_start(config)
    if config.metrics:
        import pdserve.kvpool.node.metrics.server  # noqa: F401
    return start


def _checked(config: PoolNodeConfig) -> tuple[PoolNodeConfig, list[str]]:
    """The configuration with its secrets and its capacity, and the tokens that it lacks."""
    for address in config.listen:
        parse_address(address)
    config = with_capacity(with_secrets(config, os.environ))
    return config, check_open(config, rules_of(config))


class _End:
    """Handles the signals that end this process, from before its loop runs until the next program starts.

    During an upgrade the main thread blocks these signals, but another thread may take one. Then it is sent
    to the main thread again, where it stays pending: pending signals outlive `exec`.
    """

    def __init__(self, *, told: bool) -> None:
        self._told = told  # a signal came
        self._stop: Callable[[], object] = lambda: None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle one signal."""
        if number in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
            signal.pthread_kill(threading.get_ident(), number)
            return
        self._told = True
        self._stop()

    def ends(self, node: PoolNode) -> None:
        """Stop this node of the running loop at a signal; as soon as it serves, if the signal came before."""
        loop = asyncio.get_running_loop()

        def stop() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the node has ended
                loop.call_soon_threadsafe(node.stop)

        self._stop = stop
        if self._told:
            stop()


async def _run(config: PoolNodeConfig, inherited: Handover | None, end: _End) -> Handover | None:
    node = PoolNode(config, inherited)
    end.ends(node)
    await node.serve(lambda: _on_ready(node))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which outlives `exec`
    return node.handover


def _on_ready(node: PoolNode) -> None:
    # what was made until then stays: the collector would take 20 ms to look at the index of a million pages
    gc.freeze()
    loop = asyncio.get_running_loop()

    def upgrade(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(node.upgrader.on_signal)

    signal.signal(signal.SIGHUP, upgrade)


logger = logging.getLogger(__name__)


SWITCH_S = 0.0005
"""How soon a thread that copies pages gives the interpreter to the event loop; 10 times Python's own rate."""
OTHER_FILES = 64  # open files of a node beside its sockets


def allow_open_files(name: str, max_connections: int, sockets: int) -> None:
    """Let this process open as many files as it may; say so where that is too few for `sockets`."""
    hard = raise_open_files()
    needed = sockets + OTHER_FILES
    if hard is not None and hard < needed:
        logger.warning(
            "node %s: max_connections = %d needs %d open files, this process may have %d: raise the limit "
            "(ulimit -Hn, LimitNOFILE=, --ulimit nofile=), or lower max_connections",
            name,
            max_connections,
            needed,
            hard,
        )
