"""Process sessions on Linux: the members of a session, and the end of a whole session.

Every process that the supervisor has an agent start leads a session of its own. Its children (SGLang's
scheduler, compilers) stay in the session. So whole sessions are ended: no child is left behind, even when the
leader died without stopping its children.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

POLL_S: Final = 0.02
DEAD: Final = (b"Z", b"X")
"""States of /proc/PID/stat."""
_WISH: Final = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):  # it died before
    os._exit(1)
for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would keep that
    signal.signal(number, signal.SIG_DFL)
os.execv(sys.argv[2], sys.argv[3:])
"""
"""Asks for SIGTERM when the parent dies, and becomes the command. The wish survives exec."""


def dies_with_parent(command: Sequence[str | Path]) -> list[str]:
    """The command, to be started by this process, which gets SIGTERM when this process dies.

    The wish is made by a Python of its own that becomes the command. Code between fork and exec of a process
    with threads may wait for a lock for ever (`preexec_fn`). Raises FileNotFoundError.
    """
    program, *arguments = map(str, command)
    if (found := shutil.which(program)) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), program)
    return [sys.executable, "-I", "-S", "-c", _WISH, str(os.getpid()), found, program, *arguments]


def session_members(session: int) -> list[int]:
    """The ids of the live processes of a session, zombies left out."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it ended while we were looking
                # PID (NAME, of any bytes) STATE PARENT GROUP SESSION ...
                words = (entry / "stat").read_bytes().rpartition(b") ")[2].split(b" ", 4)
                if int(words[3]) == session and words[0] not in DEAD:
                    members.append(int(entry.name))
    return members


def signal_processes(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each process that is still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_session(session: int, timeout_s: float = 5.0) -> None:
    """SIGKILL all of a session, again while new members appear, until none is left or the time is up."""
    deadline = time.monotonic() + timeout_s
    while (members := session_members(session)) and time.monotonic() < deadline:
        signal_processes(members, signal.SIGKILL)
        time.sleep(POLL_S)


def end_sessions(sessions: Iterable[int], grace_s: float) -> None:
    """SIGTERM the leaders, wait at most `grace_s` for the sessions to empty, and SIGKILL what is left."""
    left = set(sessions)
    signal_processes(left, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while (left := {s for s in left if session_members(s)}) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for session in left:
        kill_session(session)
