"""Process sessions on Linux: who belongs to one, and how one is ended whole.

Every process that the supervisor starts leads a session of its own. What that process starts in turn
(SGLang's scheduler, compilers) stays in the session, so a session is the unit that is ended: nothing of it is
left behind even where the leader died without telling its children.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

POLL_S: Final = 0.02


def session_members(session: int) -> list[int]:
    """The ids of the live processes of a session, zombies left out."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):  # it ended while we were looking
            # the second field, the name in brackets, may hold spaces, brackets and any byte
            state, _parent, _group, its_session = (
                (entry / "stat").read_bytes().rpartition(b")")[2].split(maxsplit=4)[:4]
            )
            if int(its_session) == session and state not in b"ZX":
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
