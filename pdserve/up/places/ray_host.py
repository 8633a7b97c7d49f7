"""What runs on a Ray node for one process: starts it, gives its output on, and ends it. An actor of Ray.

It imports nothing but the standard library, so Ray's workers need no pdserve in their own environment. The
process itself is run by the Python that the supervisor names, which is there at the same path.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

MAX_WAITING_BYTES = 4 << 20
READ_BYTES = 64 * 1024


class ProcessHost:
    """One process. `output` is asked again and again by the supervisor, until the process has ended."""

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        config_path: str,
        config: str,
        directory: str,
    ) -> None:
        """Write the configuration, readable by this user alone, and start in `directory`, where paths of the
        cluster file begin, if it is there. Raises OSError.
        """
        path = Path(config_path)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(config)
        self._changed = threading.Condition()
        self._waiting = b""
        self._status: int | None = None
        self._process = subprocess.Popen(
            [*argv[:5], str(os.getpid()), *argv[5:]],
            cwd=directory if Path(directory).is_dir() else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self._reaper = self._start_reaper(argv[0], environment)
        self._tell_reaper("+")
        threading.Thread(target=self._read, daemon=True).start()

    def process_id(self) -> int:
        """It was started."""
        return self._process.pid

    def output(self, wait_s: float) -> tuple[bytes, int | None]:
        """(output since the last call, exit status once it has ended). Waits for either, at most `wait_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._status is not None, wait_s)
            data, self._waiting = self._waiting, b""
            self._changed.notify_all()
            return data, self._status

    def signal(self, number: int) -> None:
        """To the process itself."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """The process and its children, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _start_reaper(self, python: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Something that outlives this actor, and ends the session if the actor is killed. Ray kills an
        actor's children with it, so it is a grandchild.
        """
        words = [python, "-m", "pdserve.up.places.orphan_reaper"]
        reaper = subprocess.Popen(
            ["sh", "-c", '"$@" <&0 &', "sh", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        reaper.wait()
        return reaper

    def _tell_reaper(self, sign: str) -> None:
        """The session is there (`+`) or has ended (`-`)."""
        pipe = self._reaper.stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed, and cannot help
            pipe.write(f"{sign}{self._process.pid}\n".encode())
            pipe.flush()

    def _read(self) -> None:
        """The thread: take output while somebody fetches it, then the status."""
        pipe = self._process.stdout
        assert pipe is not None
        while data := os.read(pipe.fileno(), READ_BYTES):
            with self._changed:
                self._changed.wait_for(lambda: len(self._waiting) < MAX_WAITING_BYTES)
                self._waiting += data
                self._changed.notify_all()
        status = self._process.wait()
        self.kill()  # children that it left
        self._tell_reaper("-")
        with self._changed:
            self._status = status
            self._changed.notify_all()
