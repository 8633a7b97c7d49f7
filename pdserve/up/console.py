"""What `pdserve up` shows: the processes' lines under their coloured names, and its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, TextIO

_COLOURS: Final = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)  # ANSI foregrounds that read on dark and light
SUPERVISOR: Final = "up"


class Console:
    """Writes whole lines to one stream. Once that fails (its reader went away, the terminal was closed, the
    disk is full) it is silent for good; supervision goes on.
    """

    def __init__(self, stream: TextIO, names: list[str], *, echo_logs: bool = True) -> None:
        self._stream = stream
        self._echo_logs = echo_logs
        self._silent = False
        self._width = max(map(len, [*names, SUPERVISOR]))
        colours = _wants_colour(stream, os.environ)
        self._colour = {
            name: _COLOURS[i % len(_COLOURS)] if colours else None
            for i, name in enumerate(dict.fromkeys(names))
        }
        self._bold = colours

    def log(self, name: str, line: str) -> None:
        """A line of a process's own output."""
        if self._echo_logs:
            self._write(name, self._colour.get(name), line)

    def say(self, text: str) -> None:
        """A line of the supervisor's."""
        self._write(SUPERVISOR, 1 if self._bold else None, text)

    def _write(self, name: str, colour: int | None, line: str) -> None:
        if self._silent:
            return
        prefix = f"{name:<{self._width}} |"
        if colour is not None:
            prefix = f"\x1b[{colour}m{prefix}\x1b[0m"
        try:
            self._stream.write(f"{prefix} {line}\n")
            self._stream.flush()
        except (OSError, ValueError):
            self._silent = True
            self._discard()

    def _discard(self) -> None:
        """Send what the stream still holds nowhere: flushed at exit, it would fail again and change the exit
        status.
        """
        with suppress(OSError, ValueError), Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())


def _wants_colour(stream: TextIO, environ: Mapping[str, str]) -> bool:
    if environ.get("NO_COLOR"):
        return False
    return bool(environ.get("FORCE_COLOR")) or stream.isatty()
