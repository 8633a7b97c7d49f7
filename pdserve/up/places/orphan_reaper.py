"""The orphan reaper: a small process that outlives the supervisor and ends what it left behind.

The supervisor tells the reaper over a pipe which sessions it started (`+ID`) and which have ended (`-ID`).
The pipe ends when the supervisor ends, even by `kill -9`. The reaper then ends every session that is still
listed. Each child also asks the kernel for SIGTERM on its parent's death, but that reaches the child alone.
The reaper reaches the child's children too.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from typing import IO, Final

from pdserve.up.places.sessions import end_sessions

GRACE_S: Final = 3.0


class OrphanReaper:
    """The supervisor's side. Close it last."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pdserve.up.places.orphan_reaper"],
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
