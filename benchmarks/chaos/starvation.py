"""Whether the machine gives the nodes a processor: where it does not, nothing can be told about the pool.

/proc/PID/schedstat counts how long a process's main thread, a node's event loop, was ready to run and did not
(Documentation/scheduler/sched-stats.rst). Where there is no such file nothing is written down.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from benchmarks.chaos.field import Field
from benchmarks.chaos.records import Disturbed

EVERY_S: Final = 0.5
SHARE: Final = 0.5  # of that time


@contextmanager
def watching(field: Field) -> Iterator[None]:
    """Note when a node waits for a processor for most of the time."""
    enough = threading.Event()
    thread = threading.Thread(target=_watch, args=(field, enough), name="chaos-starving", daemon=True)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


def _watch(field: Field, enough: threading.Event) -> None:
    before: dict[int, float] = {}
    at_s = time.monotonic()
    while not enough.wait(EVERY_S):
        now_s = time.monotonic()
        waited = {node.name: (node.pid, _waited_s(node.pid)) for node in field.nodes}
        for name, (pid, waited_s) in waited.items():
            if waited_s - before.get(pid, waited_s) > SHARE * (now_s - at_s):
                field.note(Disturbed(at_s, now_s, "starved", name))
        before = dict(waited.values())
        at_s = now_s


def _waited_s(pid: int) -> float:
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0  # it is gone
