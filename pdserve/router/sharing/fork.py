"""How the router's parent starts a process that serves: by fork, with what it has imported already.

The parent has one thread, and imports nothing that serves, so it stays small, and a child begins with the
parent's pages and not with an interpreter of its own. A child never returns to what the parent was doing: it
serves and exits. What the parent was doing stays in its memory, untouched.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Final, NamedTuple

from pdserve.errors import ConfigError, PdserveError
from pdserve.logs import configure_logs
from pdserve.router.config.router import RouterConfig

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
READY = b"r"
"""What a child says on the line to its parent, once it serves."""
REPLACED = signal.SIGUSR1
"""Another process has taken its place."""
SIGNALS: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, REPLACED)
SERVES: Final = "pdserve.router.sharing.child"
"""Imported by its name, in the child alone."""
ENDS_S: Final = 0.01
"""Between two looks whether a process has ended."""
logger = logging.getLogger(__name__)


class Setup(NamedTuple):
    """What a child begins with."""

    name: str
    config: RouterConfig
    directory: Path
    listed_before: frozenset[str] | None = None
    """Ids of the workers that the configuration listed before it was read again, if it was."""
    is_strict: bool = False
    """Do not start with listed workers that do not fit together."""


class Sockets(NamedTuple):
    """What a child gets from its parent."""

    listening: socket.socket
    admin: socket.socket | None
    line: socket.socket
    """Closes when the parent is gone."""


def configure_logging(config: RouterConfig) -> None:
    """The log of a router's process."""
    configure_logs(config.log_format, config.log_level, text_format=LOG_FORMAT)
    for noisy in ("httpx", "httpcore", "uvicorn.error", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def start_child(
    setup: Setup, listening: socket.socket, admin: socket.socket | None
) -> tuple[int, socket.socket]:
    """The child's id, and our end of its line, which closes when it ends. Raises OSError."""
    ours, theirs = socket.socketpair()
    with theirs:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the child has handlers of its own
        try:
            gc.freeze()  # else the collector would write to all pages, which then are shared no more
            pid = os.fork()
            if not pid:
                _live(setup, Sockets(listening, admin, theirs))
        except OSError:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            gc.unfreeze()
    ours.setblocking(False)
    return pid, ours


async def exit_status(pid: int) -> int:
    """Of a child that ends: its line is closed already, so this takes a moment only."""
    while not (found := os.waitpid(pid, os.WNOHANG))[0]:  # noqa: ASYNC110, ASYNC222 - it does not wait
        await asyncio.sleep(ENDS_S)
    return os.waitstatus_to_exitcode(found[1])


def _live(setup: Setup, sockets: Sockets) -> None:
    """A child's whole life."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:  # a terminal's go to all: the parent's count
            is_parents = number in (signal.SIGHUP, signal.SIGINT)
            signal.signal(number, signal.SIG_IGN if is_parents else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        _close_all_but({0, 1, 2, *(one.fileno() for one in sockets if one is not None)})
        configure_logging(setup.config)
        importlib.import_module(SERVES).serve(setup, sockets)
        status = 0
    except PdserveError as error:
        sys.stderr.write(f"pdserve router: error: {error}\n")
        status = 2 if isinstance(error, ConfigError) else 1
    except Exception:  # boundary: the process ends
        logger.exception("a router process failed")
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def _close_all_but(kept: set[int]) -> None:
    """A child that had the line of another would keep it alive without its parent. The numbers stay in use:
    what the parent has made of them is still in memory, and closes them some day.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - descriptors
        if number not in kept and number != null:
            try:
                os.dup2(null, number)
            except OSError:  # that of the list itself, or a stranger's beyond the limit
                with contextlib.suppress(OSError):
                    os.close(number)
    os.close(null)
