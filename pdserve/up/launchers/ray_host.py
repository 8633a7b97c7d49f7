"""What runs on a Ray node for one process: an actor of Ray that has agent.py run it.

It imports nothing but the standard library, so Ray's workers need no pdserve in their own environment. The
process itself is run by the Python that the supervisor names, which is there at the same path.

The actor may be killed at any time, as by Ray when memory is short. All that it starts hangs on the pipe to
agent.py, which ends the process when the pipe ends. Ray kills the children of an actor with it, so
agent.py is a grandchild.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

MAX_WAITING_BYTES = 4 << 20
READ_BYTES = 64 * 1024
AS_GRANDCHILD = '{ "$@" <&3 3<&- & } 3<&0; wait $!'
"""A shell gives what it starts with & an empty input. `<&0` would lead to that one."""


class ProcessHost:
    """One process. `output` is asked again and again by the supervisor, until the process has ended."""

    def __init__(self, agent: Sequence[str], order: bytes, directory: str) -> None:
        """Have `agent` carry out the order, in `directory`, where paths of the cluster file begin, if it is
        there. Raises OSError.
        """
        self._changed = threading.Condition()
        self._waiting = b""
        self._status: int | None = None
        self._process = subprocess.Popen(
            ["sh", "-c", AS_GRANDCHILD, "sh", *agent],
            cwd=directory if Path(directory).is_dir() else None,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.say(order)
        threading.Thread(target=self._read, daemon=True).start()

    def started(self) -> None:
        """The actor is there."""

    def output(self, wait_s: float) -> tuple[bytes, int | None]:
        """(output since the last call, exit status of the agent once it has ended). Waits for either, at most
        `wait_s`.
        """
        self.say(b"")  # the supervisor is there
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._status is not None, wait_s)
            data, self._waiting = self._waiting, b""
            self._changed.notify_all()
            return data, self._status

    def say(self, line: bytes) -> None:
        """To the agent."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended
            os.write(self._process.stdin.fileno(), line + b"\n")

    def _read(self) -> None:
        """The thread: take output while somebody fetches it, then the status."""
        assert self._process.stdout is not None
        while data := os.read(self._process.stdout.fileno(), READ_BYTES):
            with self._changed:
                self._changed.wait_for(lambda: len(self._waiting) < MAX_WAITING_BYTES)
                self._waiting += data
                self._changed.notify_all()
        status = self._process.wait()
        with self._changed:
            self._status = status
            self._changed.notify_all()
