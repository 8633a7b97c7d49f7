"""A process that loads a pool with one kind of work, counted on a board that it shares with the benchmark.

Run as `python -m benchmarks.pool.load_process CONFIG.json`. It rests while the board says so, and ends at
SIGTERM.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from benchmarks.boards import Rows, new_rows, open_rows
from benchmarks.dice import Dice
from benchmarks.processes import Child, ClientConfig, clients, read_config, run_threads, stop_at_sigterm
from benchmarks.stores import BenchError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.protocol.base import KEY_BYTES

REST_S: Final = 0.01
START_TIMEOUT_S: Final = 60.0
CONNECT_TIMEOUT_S: Final = (
    10.0  # nodes of one host load UCX for their first client by it: not what is measured
)

# Columns of the board, one row of int64 for each thread of the run; row 0 is the benchmark's own
GO: Final = 0  # row 0: work
OPERATIONS: Final = 0
PAGES: Final = 1  # read or stored
MISSED: Final = 2  # not read, or not stored
COLUMNS: Final = 3


class DriverConfig(msgspec.Struct, frozen=True):
    """`keys`: how many pages it works on, `seed`: which. Every operation takes `batch` of them, `put_share`
    of them puts. `operations_s` of each thread; 0: as fast as it goes. `row`: its first on the board.
    `yields`: it runs only where nobody else wants to, as if it ran elsewhere.
    """

    name: str
    client: PoolClientConfig
    namespace: str
    geometry: dict[str, str]
    board: str
    row: int
    threads: int
    keys: list[bytes]
    page_bytes: int
    batch: int
    put_share: float = 0.0
    operations_s: float = 0.0
    yields: bool = False


def run_when_idle(thread: int = 0) -> None:
    """Let a thread (0: this one) and what it starts run only where nobody else wants to. Raises OSError."""
    os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def make_keys(seed: str, count: int) -> list[bytes]:
    dice = Dice("driver", seed)
    return [
        b"".join(dice.below(2**64).to_bytes(8, "little") for _ in range(KEY_BYTES // 8)) for _ in range(count)
    ]


class Board:
    """Of the benchmark: `rows` threads work."""

    def __init__(self, path: Path, rows: int) -> None:
        self.path = str(path)
        self._rows = new_rows(path, 1 + rows, COLUMNS)

    def go(self, work: bool) -> None:
        self._rows[0, GO] = work

    def await_work(self) -> None:
        """Until every thread has done something. Raises BenchError."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._rows[1:, OPERATIONS].all():
            if time.monotonic() > deadline_s:
                raise BenchError(f"a load driver did nothing within {START_TIMEOUT_S:.0f} s")
            time.sleep(REST_S)

    def totals(self, rows: slice = slice(1, None)) -> dict[str, int]:
        """Since the start."""
        sums = self._rows[rows].sum(axis=0)
        return {"operations": int(sums[OPERATIONS]), "pages": int(sums[PAGES]), "missed": int(sums[MISSED])}


def open_board(path: str) -> Rows:
    """Shape [rows, COLUMNS], shared by all who open it."""
    return open_rows(path, COLUMNS)


def fill(client: PoolClient, keys: Sequence[bytes], page_bytes: int, batch: int = 32) -> None:
    """Put pages of some bytes. Raises BenchError."""
    page = np.random.default_rng(0).integers(0, 256, page_bytes, np.uint8)
    for start in range(0, len(keys), batch):
        some = keys[start : start + batch]
        if not all(client.put(some, [(page,)] * len(some))):
            raise BenchError(
                "the pool did not store a page: is its capacity large enough, and the node well?"
            )


def driving(
    configs: Sequence[ClientConfig], directory: Path, module: str = "benchmarks.pool.load_process"
) -> AbstractContextManager[dict[str, Child]]:
    """The processes run, and rest until the board says go. Raises BenchError if one ended badly."""
    return clients(configs, directory, module)


def _drive(config: DriverConfig, index: int, client: PoolClient, stop: threading.Event) -> None:
    """One thread's work."""
    board = open_board(config.board)
    mine = board[config.row + index]
    dice = Dice(config.name, index)
    memory = np.zeros((config.batch, config.page_bytes), np.uint8)
    pages = [(page,) for page in memory]
    next_s = time.monotonic()
    while not stop.is_set():
        if not board[0, GO]:
            stop.wait(REST_S)
            next_s = time.monotonic()
            continue
        if config.operations_s:
            next_s += 1 / config.operations_s  # open loop: what is late is not forgiven, up to a second
            next_s = max(next_s, time.monotonic() - 1.0)
            stop.wait(max(0.0, next_s - time.monotonic()))
        first = dice.below(max(1, len(config.keys) - config.batch + 1))
        keys = config.keys[first : first + config.batch]
        work = client.put if dice.chance(config.put_share) else client.get
        done = sum(work(keys, pages[: len(keys)]))
        mine[OPERATIONS] += 1
        mine[PAGES] += done
        mine[MISSED] += len(keys) - done


def main(config_path: str) -> None:
    config = read_config(config_path, DriverConfig)
    if config.yields:
        run_when_idle()
    stop = stop_at_sigterm()
    client = PoolClient(config.client, config.namespace, config.geometry, name=config.name)
    run_threads([partial(_drive, config, index, client, stop) for index in range(config.threads)], stop)
    client.close()


if __name__ == "__main__":
    main(sys.argv[1])
