"""Process sessions on Linux: the members of a session, and the end of a whole session.

Every process that the supervisor starts leads a session of its own. Its children (SGLang's scheduler,
compilers) stay in the session. So the supervisor ends whole sessions: no child is left behind, even when the
leader died without stopping its children.

The orphan reaper is a small process that outlives the supervisor and ends what it left behind. The supervisor
tells it over a pipe which sessions it started (`+ID`) and which have ended (`-ID`). The pipe ends when the
supervisor ends, even by `kill -9`. The reaper then ends every session that is still listed. Each child also
asks the kernel for SIGTERM on its parent's death, but that reaches the child alone. The reaper reaches the
child's children too. Run as `python -m pdserve.up.launchers.sessions`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import IO, Final

import psutil

GRACE_S: Final = 3.0
"""Of sessions that the supervisor left behind."""
POLL_S: Final = 0.02
DEAD: Final = frozenset({psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD})


def session_members(session: int) -> list[int]:
    """The ids of the live processes of a session, zombies left out."""
    members = []
    for pid in psutil.pids():
        with suppress(OSError, psutil.Error):  # it ended while we were looking
            if os.getsid(pid) == session and psutil.Process(pid).status() not in DEAD:
                members.append(pid)
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


class OrphanReaper:
    """The supervisor's side. Close it last."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pdserve.up.launchers.sessions"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal is the supervisor's alone
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, session: int) -> None:
        """End this session should the supervisor go away."""
        self._say(f"+{session}\n")

    def forget(self, session: int) -> None:
        """This session has ended; its number may come to mean another one."""
        self._say(f"-{session}\n")

    def close(self) -> None:
        """Let the reaper end the sessions that were not forgotten, and wait for it."""
        pipe = self._process.stdin
        assert pipe is not None
        with suppress(BrokenPipeError):
            pipe.close()
        try:
            self._process.wait(timeout=2 * GRACE_S + 5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _say(self, line: str) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with suppress(BrokenPipeError):  # a reaper that was killed cannot help; supervision goes on
            pipe.write(line.encode())
            pipe.flush()


def run(lines: IO[str]) -> None:
    """Keep the list that `lines` tells and end what is on it when they end."""
    sessions: set[int] = set()
    for line in lines:
        session = int(line[1:])
        if line.startswith("+"):
            sessions.add(session)
        else:
            sessions.discard(session)
    end_sessions(sessions, GRACE_S)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    run(sys.stdin)
