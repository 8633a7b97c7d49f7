"""A client of the soak: a steady mix of operations from two threads that share one pool client.

Run as `python -m benchmarks.soak.client CONFIG.json`. It ends at SIGTERM. Where it is to be renewed, the
pool client is closed every so often and another made, so that what a connection leaves behind adds up.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from typing import Final

import msgspec
import numpy as np

from benchmarks.boards import open_rows
from benchmarks.chaos import pages as p
from benchmarks.dice import Dice
from benchmarks.processes import read_config, run_threads, stop_at_sigterm
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig

NAMESPACE: Final = "soak"
GEOMETRY: Final = {"soak": "1"}
THREADS: Final = 2
BATCH: Final = 8
HOLD_POLL_S: Final = 0.002
POISON: Final = 0xEE

# Columns of the board, one row of int64 for each thread of the run; row 0 is the sampler's
HOLD: Final = 0  # row 0: do nothing for now
IDLE: Final = 0  # this thread does nothing now
OPERATIONS: Final = 1
PAGES_READ: Final = 2
WRONG: Final = 3
FAILED: Final = 4  # operations cut short by an error or a deadline
COLUMNS: Final = 5


class SoakClientConfig(msgspec.Struct, frozen=True):
    """`row`: first of this process's rows on the board. `pages`: how many different pages it writes."""

    name: str
    client: PoolClientConfig
    board: str
    row: int
    pages: int
    operations_s: float  # of each thread
    renew_s: float  # after so long the pool client is closed and made anew; 0: never


class SharedClient:
    """The pool client of both threads, renewed now and then where that is asked for."""

    def __init__(self, config: SoakClientConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._failures = 0
        self._renew()

    def now(self) -> PoolClient:
        with self._lock:
            if time.monotonic() > self._until_s:
                self._failures += self._client.counters.failures
                self._client.close()  # the other thread's operation ends with misses
                self._renew()
            return self._client

    def failures(self) -> int:
        with self._lock:
            return self._failures + self._client.counters.failures

    def close(self) -> None:
        self._client.close()

    def _renew(self) -> None:
        self._client = PoolClient(self._config.client, NAMESPACE, GEOMETRY, name=self._config.name)
        self._until_s = time.monotonic() + (self._config.renew_s or math.inf)


class SoakThread:
    """One thread's work."""

    def __init__(
        self, config: SoakClientConfig, index: int, shared: SharedClient, stop: threading.Event
    ) -> None:
        self._config = config
        self._shared = shared
        self._stop = stop
        self._dice = Dice(config.name, index)
        self._board = open_rows(config.board, COLUMNS)
        self._mine = self._board[config.row + index]
        size = sum(p.SHAPES[0])
        self._memory = np.empty((BATCH, size), np.uint8)

    def run(self) -> None:
        """Until `stop`."""
        pause_s = 1 / self._config.operations_s
        while not self._stop.wait(self._dice.between(0.2, 1.8) * pause_s):
            while self._board[0, HOLD] and not self._stop.is_set():
                self._mine[IDLE] = 1
                time.sleep(HOLD_POLL_S)
            self._mine[IDLE] = 0
            self._operate()
            self._mine[OPERATIONS] += 1
            self._mine[FAILED] = self._shared.failures()
        self._mine[IDLE] = 1

    def _operate(self) -> None:
        client, dice = self._shared.now(), self._dice
        first = dice.below(self._config.pages) * p.LARGE_EVERY * 2 + 1  # of the small shape
        keys = [p.key_of(0, first + index * p.LARGE_EVERY) for index in range(BATCH)]
        kind = dice.below(8)
        if kind < 3:
            size = sum(p.SHAPES[0])
            client.put(keys, [(p.content(key, size),) for key in keys])
        elif kind < 6:
            self._memory[:] = POISON
            got = client.get(keys, [(page,) for page in self._memory])
            for ok, key, page in zip(got, keys, self._memory, strict=True):
                self._mine[WRONG] += ok and not np.array_equal(page, p.content(key, page.nbytes))
            self._mine[PAGES_READ] += sum(got)
        else:
            client.exists(keys)


def main(config_path: str) -> None:
    config = read_config(config_path, SoakClientConfig)
    stop = stop_at_sigterm()
    shared = SharedClient(config)
    run_threads([SoakThread(config, index, shared, stop).run for index in range(THREADS)], stop)
    shared.close()


if __name__ == "__main__":
    main(sys.argv[1])
