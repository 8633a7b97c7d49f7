"""Ends the servers of a test run that is itself ended (`timeout`, `kill -9`) before it could stop them.

The reaper is a small process that outlives the run. It is told over a pipe which sessions the run started
(`+ID`) and which have ended (`-ID`). The pipe ends when the run ends, and the reaper then ends every session
that is still listed. It is `python -m tests.support.left_behind`.
"""

from __future__ import annotations

import atexit
import functools
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from pdserve.up.launchers.sessions import end_sessions

GRACE_S: Final = 3.0


class OrphanReaper:
    """The run's side. Close it last."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal is the run's alone
            cwd=Path(__file__).parents[2],
        )

    def watch(self, session: int) -> None:
        """End this session should the run go away."""
        self._say(f"+{session}\n")

    def forget(self, session: int) -> None:
        """This session has ended; its number may come to mean another one."""
        self._say(f"-{session}\n")

    def close(self) -> None:
        """Let the reaper end the sessions that were not forgotten, and wait for it."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=2 * GRACE_S + 5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # a reaper that was killed cannot help
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


@functools.cache
def reaper() -> OrphanReaper:
    """Of this process. Tell it each session that a test starts, and each that has ended."""
    reaper = OrphanReaper()
    atexit.register(reaper.close)
    return reaper


def main() -> None:
    """Keep the list that standard input tells, and end what is on it when that ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin:
        (sessions.add if line.startswith("+") else sessions.discard)(int(line[1:]))
    end_sessions(sessions, GRACE_S)


if __name__ == "__main__":
    main()
