"""How long something took, without the time in which a busy machine had no processor for it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

MOST_S = 30.0  # of such time that is believed


def without_processor_s(pids: Sequence[int]) -> float:
    """How long these processes' main threads and this thread were ready to run, and had no processor; and how
    long this machine's processors were its host's.
    """
    waited_ns = 0
    for process in ("thread-self", *pids):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            waited_ns += int(Path(f"/proc/{process}/schedstat").read_text().split()[1])
    stolen = int(Path("/proc/stat").read_text().split(maxsplit=9)[8])
    return waited_ns / 1e9 + stolen / os.sysconf("SC_CLK_TCK")


class Stopwatch:
    """From its making on, in a thread that calls this and in processes that all live on."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._begun_s = time.monotonic()
        self._before_s = without_processor_s(pids)

    def passed_s(self, at_s: float | None = None) -> float:
        """Until now, or a moment of time.monotonic() that has just been."""
        until_s = time.monotonic() if at_s is None else at_s
        starved_s = min(MOST_S, without_processor_s(self._pids) - self._before_s)
        return until_s - self._begun_s - starved_s
