"""What `pdserve up` shows: the processes' lines under their coloured names, and its own."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping
from typing import Final, TextIO

_COLOURS: Final = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)  # ANSI foregrounds that read on dark and light
SUPERVISOR: Final = "up"
MAX_WAITING_BYTES: Final = 4 << 20
CLOSE_TIMEOUT_S: Final = 1.0


class Console:
    """Shows whole lines on one stream, written by a thread of their own: a reader that stands still (Ctrl-S,
    a pager, a connection that sleeps) holds up nobody. Of more than `MAX_WAITING_BYTES` that wait for it the
    oldest lines are dropped, and counted. Once writing fails (the reader went away, the terminal was closed,
    the disk is full) it is silent for good; supervision goes on. Whoever made it must `close` it.
    """

    def __init__(self, stream: TextIO, names: list[str]) -> None:
        stream.flush()
        # past the stream, whose lock a thread that hangs would hold at exit; the thread's own, since it may
        # hang for longer than the stream is open, and its number may be another file's by then
        self._file = os.dup(stream.fileno())
        self._encoding = stream.encoding
        self._width = max(map(len, [*names, SUPERVISOR]))
        self._colours = _wants_colour(stream, os.environ)
        self._number = {name: i for i, name in enumerate(dict.fromkeys(names))}
        """By process. Those that scaling adds come behind."""
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._dropped = 0
        self._ended = False
        """Nothing more is taken: closed, or writing failed."""
        self._writer = threading.Thread(target=self._write_all, name="console", daemon=True)
        self._writer.start()

    def log(self, name: str, line: str) -> None:
        """A line of a process's own output."""
        number = self._number.setdefault(name, len(self._number))
        colour = _COLOURS[number % len(_COLOURS)] if self._colours else None
        self._put(self._shown(name, colour, line))

    def say(self, text: str) -> None:
        """A line of the supervisor's."""
        self._put(self._shown(SUPERVISOR, 1 if self._colours else None, text))

    def close(self) -> None:
        """Let what waits be written, for at most `CLOSE_TIMEOUT_S`."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._writer.join(CLOSE_TIMEOUT_S)

    def _shown(self, name: str, colour: int | None, line: str) -> bytes:
        prefix = f"{name:<{self._width}} |"
        if colour is not None:
            prefix = f"\x1b[{colour}m{prefix}\x1b[0m"
        # a process's output may hold what the terminal cannot show
        return f"{prefix} {line}\n".encode(self._encoding, "replace")

    def _put(self, line: bytes) -> None:
        with self._changed:
            if self._ended:
                return
            self._waiting.append(line)
            self._waiting_bytes += len(line)
            while self._waiting_bytes > MAX_WAITING_BYTES:
                self._waiting_bytes -= len(self._waiting.popleft())
                self._dropped += 1
            self._changed.notify()

    def _write_all(self) -> None:
        """The thread: write what waits, until closed or until it cannot be written."""
        try:
            while lines := self._take():
                while lines:
                    lines = lines[os.write(self._file, lines) :]
        except OSError:
            with self._changed:
                self._ended = True
                self._waiting.clear()
        finally:
            os.close(self._file)

    def _take(self) -> bytes:
        """All that waits, once there is something; empty after the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended)
            lines = b"".join(self._waiting)
            if self._dropped:
                text = f"{self._dropped} lines not shown: nobody read them; the logs have them"
                lines = self._shown(SUPERVISOR, 1 if self._colours else None, text) + lines
            self._waiting.clear()
            self._waiting_bytes = self._dropped = 0
            return lines


def _wants_colour(stream: TextIO, environ: Mapping[str, str]) -> bool:
    if environ.get("NO_COLOR"):
        return False
    return bool(environ.get("FORCE_COLOR")) or stream.isatty()
