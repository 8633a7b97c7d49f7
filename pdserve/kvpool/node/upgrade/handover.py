"""How a node goes on as another program in the same process (`pdserve pool upgrade`).

    the process                           its child, a stand-in of the new version
    ------------------------------------  ----------------------------------------
    serves                                loads itself                  -> "ready"
    lets go of the memory         "go" ->
                                          takes over, serves          -> "serving"
    executes the new version
    loads itself               "ready" ->
                                          lets go of the memory            -> "go"
    takes over, serves       "serving" -> ends

Why the process stays: its id is what a supervisor watches (`pdserve up`, systemd, a container's init), and so
are its parent, session, output and environment; `exec` keeps them all. Why there is a stand-in: a program
takes a second of CPU to load, in which nobody would answer. So nobody answers only while the memory changes
hands, twice.

Both have the listening sockets and the lock on the arena's directory from the start; the baton, a socket
between the two, says whose turn it is. Who let go stays at the door until the other serves: it tells those
who come that they shall wait. The pages stay where they are, in files; each takes them over as after a crash.

Who dies on the way: the stand-in, before "go": no upgrade; later: the process goes on, as soon as it has
loaded. The process: the stand-in ends, before it serves or at once; the pages stay for the next start.
SIGTERM and SIGINT to the process are held back until it serves again, and then end it. Holding concerns the
thread that does it, and libraries have threads of their own (UCX, BLAS) that take a signal all the same: the
program that is told so passes that on, too (process.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Final, NoReturn

import msgspec
from msgspec.structs import replace

logger = logging.getLogger(__name__)

ENVIRONMENT: Final = "PDSERVE_POOL_HANDOVER"
READY: Final = "ready"
GO: Final = "go"
SERVING: Final = "serving"
TURN_S: Final = 60.0  # for the other to let go: it has a few seconds' work at most
WORD_BYTES: Final = 8192
ENDING: Final = (signal.SIGTERM, signal.SIGINT)


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """Descriptors by use. `pid`: whose they are, itself or its child. `since_s`: when the node stopped
    answering, of time.monotonic(), which goes on. `ucx`: it was in use. `status`: the node's in the pool.
    """

    pid: int
    lock_fd: int
    listening: dict[str, list[int]]  # by address
    since_s: float = 0.0
    baton_fd: int = -1  # none: nobody serves meanwhile
    stand_in: int = 0  # the child's pid, for the process itself
    stderr_fd: int = -1  # a stand-in's, from the moment it serves
    ucx: bool = False
    status: int = 0
    peers: list[str] = []  # where the others are

    @property
    def fds(self) -> set[int]:
        """All of them."""
        fds = {self.lock_fd, *(fd for fds in self.listening.values() for fd in fds)}
        return fds | {fd for fd in (self.baton_fd, self.stderr_fd) if fd >= 0}

    def close(self) -> None:
        """It was for nothing."""
        for fd in self.fds:
            os.close(fd)


class Baton:
    """Words to and from the other."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def fileno(self) -> int:
        """For who passes it on."""
        return self._socket.fileno()

    def say(self, word: str) -> None:
        """To whoever is still there."""
        with contextlib.suppress(OSError):
            self._socket.send(word.encode())

    def hear(self, timeout_s: float) -> str:
        """Wait for a word; "" if the other is gone, or says nothing for so long. Blocks."""
        self._socket.settimeout(timeout_s)
        try:
            return self._socket.recv(WORD_BYTES).decode()
        except OSError:  # TimeoutError too
            return ""

    async def heard(self, timeout_s: float | None = None) -> str:
        """As `hear`; without `timeout_s` however long it takes."""
        self._socket.setblocking(False)
        try:
            async with asyncio.timeout(timeout_s):
                data = await asyncio.get_running_loop().sock_recv(self._socket, WORD_BYTES)
        except OSError:
            return ""
        return data.decode()

    def close(self) -> None:
        self._socket.close()


class Succession:
    """What this program was passed by the one before."""

    def __init__(self, handover: Handover) -> None:
        self.handover = handover
        self.stands_in = handover.pid != os.getpid()
        self.since_s = handover.since_s
        self.baton = None if handover.baton_fd < 0 else Baton(socket.socket(fileno=handover.baton_fd))

    def await_turn(self, found: str = "") -> bool:
        """Once everything is loaded, wait until the other has let go; False: there is nothing to take over
        any more. `found` is for the other to judge. Blocks.
        """
        if self.baton is None:
            return True
        self.baton.say(f"{READY} {found}")
        word, _, since = self.baton.hear(TURN_S).partition(" ")
        if word == GO:
            self.since_s = float(since)
            if self.handover.stderr_fd >= 0:
                os.dup2(self.handover.stderr_fd, sys.stderr.fileno())
                os.close(self.handover.stderr_fd)
            return True
        if not self.stands_in:
            with contextlib.suppress(ProcessLookupError):  # it is dead, most likely
                os.kill(self.handover.stand_in, signal.SIGKILL)
            self.end()
        return not self.stands_in

    def end(self) -> None:
        """The other ends, or has: take note of its end, so that no zombie stays."""
        if self.baton is not None:
            self.baton.close()
            self.baton = None
        if not self.stands_in and self.handover.stand_in:
            threading.Thread(target=_reap, args=(self.handover.stand_in,), daemon=True).start()


def received() -> Succession | None:
    """What this process was passed; None if it was started in the ordinary way. Can be asked once."""
    text = os.environ.pop(ENVIRONMENT, "")
    try:
        handover = msgspec.json.decode(text, type=Handover) if text else None
    except msgspec.MsgspecError:
        return None
    if handover is None or handover.pid not in (os.getpid(), os.getppid()):
        return None
    for fd in handover.fds:
        os.set_inheritable(fd, False)
    return Succession(handover)


def start_stand_in(handover: Handover, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start this process's command, from whatever is installed now, as its child. What it says until it
    serves goes to `errors`. Raises OSError.
    """
    stderr_fd = os.dup(sys.stderr.fileno())
    try:
        passed = replace(handover, stderr_fd=stderr_fd)
        return subprocess.Popen(
            command(),
            stdin=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, ENVIRONMENT: msgspec.json.encode(passed).decode()},
            pass_fds=sorted(passed.fds),
        )
    finally:
        os.close(stderr_fd)


def replace_process(handover: Handover) -> NoReturn:
    """Start this process's command anew, from whatever is installed now. Raises OSError."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        fd = int(entry.name)
        if fd > 2:
            with contextlib.suppress(OSError):  # the one of this listing
                os.set_inheritable(fd, fd in handover.fds)
    os.environ[ENVIRONMENT] = msgspec.json.encode(handover).decode()
    logger.info("process %d goes on as: %s", os.getpid(), " ".join(command()))
    for handler in logging.getLogger().handlers:
        handler.flush()
    os.execv(sys.executable, command())


def hold_signals(*, hold: bool) -> None:
    """Whether what would end this process waits, as far as this thread goes; what is held outlives `exec`."""
    signal.pthread_sigmask(signal.SIG_BLOCK if hold else signal.SIG_UNBLOCK, ENDING)


def command() -> list[str]:
    """This process's command line."""
    return [sys.executable, *sys.orig_argv[1:]]


def gap_ms(since_s: float) -> float:
    """How long nobody answered."""
    return (time.monotonic() - since_s) * 1000


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
