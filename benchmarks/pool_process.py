"""One process of `benchmarks.pool --procs`, as a rank of a worker is: host memory and a client, which works
when the board says so.

Run as `python -m benchmarks.pool_process CONFIG.json`. It ends at SIGTERM. The board is a file that all
processes of the run map: a row of int64 for each of them, and row 0 for the benchmark.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.protocol.base import KEY_BYTES
from pdserve.kvpool.protocol.page_bytes import aligned
from tests.support.processes import read_config, stop_at_sigterm

POLL_S: Final = 0.0005
Rows: TypeAlias = npt.NDArray[np.int64]
Work: TypeAlias = Literal["copy", "put", "get"]
WORKS: Final[tuple[Work, ...]] = ("copy", "put", "get")

# Columns of the board, one row of int64 for each rank; row 0 is the benchmark's own
NUMBER: Final = 0  # row 0: of the work to do, from 2; else of the work that is done. 1: the rank is ready
WORK: Final = 1  # row 0: which of WORKS
BEGAN_NS: Final = 1  # CLOCK_MONOTONIC
ENDED_NS: Final = 2
MISSED: Final = 3  # pages that were not moved
COLUMNS: Final = 4


class ProcessConfig(msgspec.Struct, frozen=True):
    """`pages` of `page_bytes` are moved in batches. `row`: this rank's on the board."""

    name: str
    client: PoolClientConfig
    board: str
    row: int
    page_bytes: int
    batch_pages: int
    pages: int


class Process:
    """Its pages, and the three things to do with them."""

    def __init__(self, config: ProcessConfig) -> None:
        size, batch = config.page_bytes, config.batch_pages
        self._memory = aligned(config.pages * size).reshape(-1, batch, size)
        self._memory[:] = np.random.default_rng(config.row).integers(0, 256, size, np.uint8)
        self._target = np.zeros((batch, size), np.uint8)
        self._names = [[os.urandom(KEY_BYTES) for _ in range(batch)] for _ in self._memory]
        self._client = PoolClient(config.client, "bench", {"bench": "1"}, name=config.name)

    def do(self, work: Work) -> int:
        """All pages once; how many were not moved."""
        if work == "copy":
            for batch in self._memory:
                self._target[:] = batch
            return 0
        move = self._client.put if work == "put" else self._client.get
        return sum(
            move(names, [[page] for page in batch]).count(False)
            for names, batch in zip(self._names, self._memory, strict=True)
        )

    def close(self) -> None:
        self._client.close()


def new_rows(path: Path, rows: int) -> Rows:
    """Make the board; all are 0."""
    path.write_bytes(np.zeros((rows, COLUMNS), np.int64).tobytes())
    return open_rows(path)


def open_rows(path: Path | str) -> Rows:
    """Shape [rows, COLUMNS], shared by all who open it."""
    with Path(path).open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.int64).reshape(-1, COLUMNS)


def work_on(config: ProcessConfig, process: Process, stop: threading.Event) -> None:
    """Do what the board says, until `stop`."""
    board = open_rows(config.board)
    mine = board[config.row]
    mine[NUMBER] = 1
    while not stop.is_set():
        number = int(board[0, NUMBER])
        if number <= mine[NUMBER]:
            time.sleep(POLL_S)
            continue
        work = WORKS[int(board[0, WORK])]
        mine[BEGAN_NS] = time.monotonic_ns()
        mine[MISSED] = process.do(work)
        mine[ENDED_NS] = time.monotonic_ns()
        mine[NUMBER] = number


def main(config_path: str) -> None:
    config = read_config(config_path, ProcessConfig)
    stop = stop_at_sigterm()
    with closing(Process(config)) as process:
        work_on(config, process, stop)


if __name__ == "__main__":
    main(sys.argv[1])
