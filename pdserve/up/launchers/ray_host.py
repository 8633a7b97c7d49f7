"""What runs on a Ray node for one process: the actor that has its agent.

The actor may be killed at any time, as by Ray when memory is short. All that it starts hangs on the pipe to
agent.py, which ends the process when the pipe ends.
"""

from __future__ import annotations

import os
import queue
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

WAIT_S = 2.0
"""One request for output waits so long."""
READ_BYTES = 64 * 1024
MAX_WAITING = 64
AS_GRANDCHILD = '{ "$@" <&3 3<&- & } 3<&0; wait $!'
"""Ray kills the children of an actor with it, and the agent has to end its process first. A shell gives what
it starts with & an empty input; `<&0` would lead to that one.
"""


class Host:
    """The actor: a command with pipes. It imports nothing but the standard library: Ray's workers need no
    pdserve in their own environment, since the command names the Python that has it.
    """

    def __init__(self, words: Sequence[str], directory: str) -> None:
        """Run it in `directory`, where paths of the cluster file begin, if it is there. Raises OSError."""
        self._read: queue.Queue[bytes] = queue.Queue(MAX_WAITING)
        self._process = subprocess.Popen(
            ["sh", "-c", AS_GRANDCHILD, "sh", *words],
            cwd=directory if Path(directory).is_dir() else None,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        threading.Thread(target=self._copy, daemon=True).start()

    def say(self, data: bytes) -> None:
        """To the command's standard input."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended
            os.write(self._process.stdin.fileno(), data)

    def output(self) -> tuple[bytes, int | None]:
        """(some output, or none within `WAIT_S`; the exit status after the last of it)"""
        try:
            data = self._read.get(timeout=WAIT_S)
        except queue.Empty:
            return b"", None
        return data, None if data else self._process.wait()

    def _copy(self) -> None:
        """The thread: take output while somebody fetches it. Nothing is its end."""
        assert self._process.stdout is not None
        while data := os.read(self._process.stdout.fileno(), READ_BYTES):
            self._read.put(data)
        self._read.put(b"")
