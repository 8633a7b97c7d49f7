"""The SGLang servers of a run, each started before the first test that needs it.

While tests run, servers of later tests start, two at a time, as many as the machine's memory holds. A test
that kills its server leaves it dead: it is started again for the next test that needs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import psutil

from tests.support.e2e.cluster import START_TIMEOUT_S, Worker, http_ok

STARTING = 2  # cores of a small machine
BYTES_EACH = 3 << 29  # of the machine: with the arenas of pool nodes, tests, and what else runs
LIMIT = max(4, min(16, psutil.virtual_memory().total // BYTES_EACH))


class Servers:
    """By name. `use` is called before each test."""

    def __init__(self, workers: Mapping[str, Worker], can_start: Callable[[], bool]) -> None:
        """`can_start`: whether to start one takes little time now."""
        self.workers = workers
        self._can_start = can_start
        self._starting: set[str] = set()

    def use(self, wanted: Iterable[str], later: Sequence[Iterable[str]]) -> None:
        """Return when the wanted servers are ready. `later`: what following tests need, in their order."""
        wanted = list(dict.fromkeys(wanted))
        order = list(dict.fromkeys([*wanted, *(name for names in later for name in names)]))
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._advance(order, wanted):
            assert time.monotonic() < deadline_s, f"not ready within {START_TIMEOUT_S} s: {wanted}"
            time.sleep(0.1)

    def stop(self) -> None:
        for name in self.workers:
            self._stop(name)

    def _advance(self, order: Sequence[str], wanted: Sequence[str]) -> bool:
        """Stop what is not needed and start what is. Returns whether all that is wanted is ready."""
        self._starting -= {name for name in self._starting if self._has_started(name)}
        running = {name for name, worker in self.workers.items() if worker.is_running}
        if not self._can_start():
            return not wanted
        missing = [name for name in order if name not in running]
        for name in running - {*order} if missing else ():
            self._stop(name)
            running.remove(name)
        for name in missing:
            if len(running) == LIMIT and name in wanted:  # make room: the one that is needed last goes
                last = max(running - {*wanted}, key=order.index)
                self._stop(last)
                running.remove(last)
            if len(running) < LIMIT and len(self._starting) < STARTING:
                self.workers[name].start()
                self._starting.add(name)
                running.add(name)
        return running.difference(self._starting).issuperset(wanted)

    def _has_started(self, name: str) -> bool:
        worker = self.workers[name]
        worker.assert_running()
        return http_ok(f"{worker.url}/pd/ready")

    def _stop(self, name: str) -> None:
        self._starting.discard(name)
        self.workers[name].end()
