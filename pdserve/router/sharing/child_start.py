"""What a child process of the router begins with, and its first steps.

The parent imports this module and not what serves, so it starts quickly and stays small.
"""

from __future__ import annotations

import importlib
import logging
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


SERVES: Final = "pdserve.router.sharing.child"
"""Imported by its name, in the child alone."""


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


def run_child(setup: Setup, sockets: Sockets) -> None:
    """A child's whole life."""
    configure_logging(setup.config)
    for number in (signal.SIGHUP, signal.SIGINT):  # a terminal's go to all: the parent's count
        signal.signal(number, signal.SIG_IGN)
    try:
        importlib.import_module(SERVES).serve(setup, sockets)
    except PdserveError as error:
        sys.stderr.write(f"pdserve router: error: {error}\n")
        sys.exit(2 if isinstance(error, ConfigError) else 1)
