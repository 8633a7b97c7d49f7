"""How a node continues as another program in the same process (`pdserve pool upgrade`).

    the process                          its child, a door keeper of the new version (door.py)
    -----------------------------------  -----------------------------------------------------
    serves                               loads itself, checks the start          -> "ready"
    lets go of the memory        "go" -> tells every new client to wait
    executes the new version
    loads itself, takes over,
    serves                    closes  -> ends

The process stays, because a supervisor watches its id (`pdserve up`, systemd, a container's init). `exec`
also keeps its parent, session, output and environment. The pages stay where they are, in files. The new
program takes them over as after a crash.

Clients that were connected are told to wait before the memory is let go, and connect again until the node
serves. A client that connects for the first time meanwhile would wait for an answer as long as the program
loads, which may be longer than its time to connect. The door keeper tells it to wait instead.

If the child dies, new clients are not told to wait: nothing else changes. If the process dies, the child
ends, and the pages stay for the next start. SIGTERM and SIGINT to the process are blocked until it serves
again, and then end it. A thread blocks signals for itself only, and libraries have threads of their own (UCX,
BLAS) that may take a signal all the same: process.py passes such a signal on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Final, NoReturn

import msgspec
from msgspec.structs import replace

from pdserve.errors import StartupError

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
    door_fd: int = -1  # the door keeper ends when this is closed
    door_pid: int = 0
    ucx: bool = False
    status: int = 0
    peers: list[str] = []  # addresses of the other nodes
    ends: bool = False  # a signal told this process to end before the next program was executed

    @property
    def fds(self) -> set[int]:
        """All descriptors."""
        fds = {self.lock_fd, *(fd for fds in self.listening.values() for fd in fds)}
        return fds | ({self.door_fd} if self.door_fd >= 0 else set())

    def close(self) -> None:
        """Close all descriptors: there will be no next program."""
        for fd in self.fds:
            os.close(fd)

    def end_door(self) -> None:
        """End the door keeper: the node serves."""
        if self.door_fd >= 0:
            os.close(self.door_fd)
            threading.Thread(target=_reap, args=(self.door_pid,), daemon=True).start()


def received() -> Handover | None:
    """What the previous program of this process left; None after an ordinary start. Can be asked once.
    Raises StartupError: the process that started this one upgrades in an older way.
    """
    text = os.environ.pop(ENVIRONMENT, "")
    try:
        handover = msgspec.json.decode(text, type=Handover) if text else None
    except msgspec.MsgspecError:
        return None
    if handover is not None and handover.pid == os.getppid():
        raise StartupError(
            "the running version cannot be upgraded to this one in place: stop the node and start it again, "
            "its pages stay in memory"
        )
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


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
