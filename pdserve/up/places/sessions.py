"""Process sessions on Linux: the members of a session, and the end of a whole session.

Every process that the supervisor starts leads a session of its own. Its children (SGLang's scheduler,
compilers) stay in the session. So the supervisor ends whole sessions: no child is left behind, even when the
leader died without stopping its children.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import psutil

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
