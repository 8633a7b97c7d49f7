"""How a node continues as another program in the same process (`pdserve pool upgrade`).

The process stays, because a supervisor watches its id (`pdserve up`, systemd, a container's init). `exec`
also keeps its parent, session, output and environment. The pages stay where they are, in files. The new
program takes them over as after a crash.

Clients that were connected are told to wait before the memory is let go, and connect again. The listening
sockets stay open, so a client that connects meanwhile waits in their queues until the new program accepts.

If the process dies, its pages stay for the next start. SIGTERM and SIGINT to the process are blocked until it
serves again, and then end it. A thread blocks signals for itself only, and libraries have threads of their
own (UCX, BLAS) that may take a signal all the same: process.py passes such a signal on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final, NoReturn

import msgspec
from msgspec.structs import replace

logger = logging.getLogger(__name__)

ENVIRONMENT: Final = "PDSERVE_POOL_HANDOVER"
ENDING: Final = (signal.SIGTERM, signal.SIGINT)


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """What a program leaves to the next one in its process. `since_s`: when the node stopped answering, of
    time.monotonic(), which continues. `ucx`: it was in use. `status`: the node's status in the pool.
    """

    pid: int
    lock_fd: int
    listening: dict[str, list[int]]  # descriptors by address
    since_s: float = 0.0
    ucx: bool = False
    status: int = 0
    peers: list[str] = []  # addresses of the other nodes
    ends: bool = False  # a signal told this process to end before the next program was executed

    @property
    def fds(self) -> set[int]:
        """All descriptors."""
        return {self.lock_fd, *(fd for fds in self.listening.values() for fd in fds)}

    def close(self) -> None:
        """Close all descriptors: there will be no next program."""
        for fd in self.fds:
            os.close(fd)


def received() -> Handover | None:
    """What the previous program of this process left; None after an ordinary start. Can be asked once."""
    text = os.environ.pop(ENVIRONMENT, "")
    try:
        handover = msgspec.json.decode(text, type=Handover) if text else None
    except msgspec.MsgspecError:
        return None
    if handover is None or handover.pid != os.getpid():
        return None
    for fd in handover.fds:
        os.set_inheritable(fd, False)
    return handover


def replace_process(handover: Handover) -> NoReturn:
    """Execute this process's command again, from the installed version. Raises OSError."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        fd = int(entry.name)
        if fd > 2:
            with contextlib.suppress(OSError):  # the descriptor of this listing
                os.set_inheritable(fd, fd in handover.fds)
    logger.info("process %d continues as the installed version", os.getpid())
    for handler in logging.getLogger().handlers:
        handler.flush()
    # Pending signals outlive `exec`. One that another thread was about to take has been seen to get lost.
    ends = not signal.sigpending().isdisjoint(ENDING)
    os.environ[ENVIRONMENT] = msgspec.json.encode(replace(handover, ends=ends)).decode()
    os.execv(sys.executable, command())


def hold_signals(*, hold: bool) -> None:
    """Block or unblock the signals that end this process, for this thread. Pending signals outlive `exec`."""
    signal.pthread_sigmask(signal.SIG_BLOCK if hold else signal.SIG_UNBLOCK, ENDING)


def command() -> list[str]:
    """This process's command line."""
    return [sys.executable, *sys.orig_argv[1:]]


def gap_ms(since_s: float) -> float:
    """For how long nobody answered."""
    return (time.monotonic() - since_s) * 1000
