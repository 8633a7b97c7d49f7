"""The SGLang servers of a run, each started before the first test that needs it.

While tests run, servers of later tests start, two at a time, as many as the machine's memory holds. A test
that kills its server leaves it dead: it is started again for the next test that needs it. One that fails to
start fails the tests that need it, and no other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil

from tests.support.e2e.cluster import START_TIMEOUT_S, Worker, http_ok

STARTING = 2  # cores of a small machine
LEAST = 4  # a test may need so many at once
FREE_BYTES = 13 << 30  # SGLang does not start where it would leave less than 10 GB; a server takes 0.6 to 1.4


class Servers:
    """By name. `use` is called before each test."""

    def __init__(self, workers: Mapping[str, Worker], can_start: Callable[[], bool]) -> None:
        """`can_start`: whether to start one takes little time now."""
        self.workers = workers
        self._can_start = can_start
        self._starting: set[str] = set()
        self._failed: set[str] = set()

    def use(self, wanted: Iterable[str], later: Sequence[Iterable[str]]) -> None:
        """Return when the wanted servers are ready. `later`: what following tests need, in their order."""
        wanted = list(dict.fromkeys(wanted))
        order = list(dict.fromkeys([*wanted, *(name for names in later for name in names)]))
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._advance(order, wanted):
            assert time.monotonic() < deadline_s, f"not ready within {START_TIMEOUT_S} s: {wanted}"
            time.sleep(0.1)

    def stop(self) -> None:
        with ThreadPoolExecutor(len(self.workers)) as threads:
            for _ in threads.map(self._stop, self.workers):
                pass

    def _advance(self, order: Sequence[str], wanted: Sequence[str]) -> bool:
        """Stop what is not needed and start what is. Returns whether all that is wanted is ready."""
        if not self._can_start():
            return not wanted
        self._starting -= {name for name in self._starting if self._has_started(name, name in wanted)}
        running = {name for name, worker in self.workers.items() if worker.is_running}
        missing = [name for name in order if name not in running]
        for name in running - {*order} if missing else ():
            self._stop(name)
            running.remove(name)
        for name in missing:
            if len(self._starting) == STARTING:
                break
            if name in wanted and not _has_room(running) and (others := running - {*wanted}):
                last = max(others, key=order.index)  # makes room: it is needed last
                self._stop(last)
                running.remove(last)
            elif name not in wanted and (name in self._failed or not _has_room(running)):
                continue
            self._failed.discard(name)
            self.workers[name].start()
            self._starting.add(name)
            running.add(name)
        return running.difference(self._starting).issuperset(wanted)

    def _has_started(self, name: str, is_wanted: bool) -> bool:
        """Or has failed. Raises AssertionError with its last words when it is wanted."""
        worker = self.workers[name]
        if is_wanted:
            worker.assert_running()
        elif not worker.is_running:
            self._failed.add(name)
            return True
        return http_ok(f"{worker.url}/pd/ready")

    def _stop(self, name: str) -> None:
        self._starting.discard(name)
        self.workers[name].end()


def _has_room(running: Collection[str]) -> bool:
    return len(running) < LEAST or psutil.virtual_memory().available > FREE_BYTES
