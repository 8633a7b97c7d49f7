"""A client of the chaos run, as a process: it reads and writes pages, checks every byte, and writes down what
it asked and got.

Run as `python -m tests.chaos.worker CONFIG.json`. It ends at SIGTERM, after what it is doing. Each
thread has a client of its own, so that a client's counters say what one operation did.
"""

from __future__ import annotations

import mmap
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Final, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig
from tests.chaos.records import Asked, Starved, to_line
from tests.support.kvpool import made_pages as p
from tests.support.processes import read_config, run_threads, stop_at_sigterm

WRITE_TOKEN: Final = "chaos-may-write-pages"
NAMESPACE: Final = "chaos"
GEOMETRY: Final = {"chaos": "1"}
MAX_BATCH: Final = 12
POISON: Final = 0xEE  # in memory before a read: bytes that were not written are wrong ones
RECENT: Final = 200  # half of the reads of owned pages go to the latest
POLL_S: Final = 0.1
CONNECT_S: Final = 15.0
BEAT_S: Final = 0.05
STARVED_S: Final = 0.25
# Columns of the board: one row of int64 for each writer of the run
WRITTEN: Final = 0  # owned pages
COLUMNS: Final = 1

Kind = Literal["put", "get", "confirmed"]


def open_board(path: Path | str) -> npt.NDArray[np.int64]:
    """Shape [writers, COLUMNS], shared by all who open it."""
    with Path(path).open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.int64).reshape(-1, COLUMNS)


class WorkerConfig(msgspec.Struct, frozen=True):
    """What one worker does. `writers` are the numbers of its threads among all that write owned pages.

    `owned`: pages that each writer may write in the whole run; `owned_s`: how many a second. `shared`: pages
    in each of the other zones. `damaged`: whether it reads pages in which bits are flipped.
    `board`: a file, see COLUMNS.
    """

    name: str
    seed: int
    client: PoolClientConfig
    writers: list[int]
    all_writers: int
    owned: int
    owned_s: float
    shared: int
    operations_s: float  # of a thread
    damaged: bool
    board: str
    output: str
    ready: str  # a file that is made when all nodes are reached
    incarnation: int = 0  # counts up when a killed worker is replaced


class Read(NamedTuple):
    """`pages`: what is in memory now, shape [pages, bytes]. `corrupt`: how many the client found damaged."""

    ok: list[bool]
    pages: npt.NDArray[np.uint8]
    corrupt: int


class Pages:
    """The pages of one thread, by their numbers; all of a call have one shape. Faults are misses."""

    def __init__(self, config: PoolClientConfig, seed: int, name: str) -> None:
        self._client = PoolClient(config, NAMESPACE, GEOMETRY, name=name)
        self._seed = seed
        self._memory = [np.empty((MAX_BATCH, sum(shape)), np.uint8) for shape in p.SHAPES]

    def up(self) -> bool:
        """Whether a node serves us, as far as we know."""
        return self._client.is_up

    def connect(self) -> bool:
        """Whether the node serves us that we ask."""
        return not any(self._client.check().values())

    def exists(self, batch: Sequence[int]) -> list[bool]:
        return self._client.exists(_keys(self._seed, batch))

    def get(self, batch: Sequence[int]) -> Read:
        memory = self._memory[_shape(batch)][: len(batch)]
        memory[:] = POISON
        before = self._client.counters.pages_corrupt
        ok = self._client.get(_keys(self._seed, batch), list(map(p.segments, memory, batch)))
        return Read(ok, memory, self._client.counters.pages_corrupt - before)

    def put(self, batch: Sequence[int]) -> tuple[list[bool], int]:
        """Which are stored now, and how many were committed by us."""
        before = self._client.counters.pages_written
        keys, size = _keys(self._seed, batch), sum(p.segments_of(batch[0]))
        whole = [p.content(key, size) for key in keys]
        stored = self._client.put(keys, list(map(p.segments, whole, batch)))
        return stored, self._client.counters.pages_written - before

    def close(self) -> None:
        self._client.close()


def _keys(seed: int, batch: Sequence[int]) -> list[bytes]:
    return [p.key_of(seed, page) for page in batch]


def _shape(batch: Sequence[int]) -> int:
    return p.SHAPES.index(p.segments_of(batch[0]))


class Worker:
    """One thread."""

    def __init__(self, config: WorkerConfig, writer: int, output: BinaryIO, stop: threading.Event) -> None:
        self._config = config
        self._writer = writer
        self._name = f"{config.name}.{writer}"
        self._output = output
        self._stop = stop
        self._draw = random.Random(f"worker {config.seed} {writer} {config.incarnation}")
        self._pages = Pages(config.client, config.seed, self._name)
        self._board = open_board(config.board)
        self._next_owned_s = time.monotonic()

    def run(self) -> None:
        """Until `stop`."""
        pause_s = 1 / self._config.operations_s
        works: Sequence[Callable[[], None]] = (
            *(self._put_shared,) * 3,
            *(self._get,) * 8,
            *(self._get_confirmed,) * 3,
        )
        while not self._stop.wait(self._draw.uniform(0.2, 1.8) * pause_s):
            if self._owned() < self._config.owned and time.monotonic() >= self._next_owned_s:
                self._put_owned()
            else:
                self._draw.choice(works)()
        self._pages.close()

    def connect(self) -> None:
        """Wait until all nodes are reached, so that what follows is asked of all; not for ever."""
        deadline = time.monotonic() + CONNECT_S
        while not self._stop.is_set() and time.monotonic() < deadline:
            if self._pages.connect():
                return
            self._stop.wait(POLL_S)

    # --- which pages

    def _owned(self) -> int:
        return int(self._board[self._writer, WRITTEN])

    def _batch(self, zone: int) -> list[int]:
        """Numbers of one shape, to read."""
        draw, size = self._draw, 1 + self._draw.randrange(MAX_BATCH)
        if zone != p.OWNED:
            chosen = [p.number(zone, 0, draw.randrange(self._config.shared)) for _ in range(size)]
        else:
            writer = draw.randrange(self._config.all_writers)
            written = int(self._board[writer, WRITTEN])
            first = max(0, written - RECENT) if draw.random() < 0.5 else 0
            chosen = [
                p.number(zone, writer, first + draw.randrange(written - first))
                for _ in range(size)
                if written
            ]
        shape = p.segments_of(chosen[0]) if chosen else ()
        return sorted({page for page in chosen if p.segments_of(page) == shape})

    def _zone(self) -> int:
        """Which pages to read: clients without checksums cannot see damage, so they are spared it."""
        drawn = self._draw.randrange(10)
        return p.OWNED if drawn < 6 else p.CONTESTED if drawn < 8 else self._damaged()

    def _damaged(self) -> int:
        return p.DAMAGED if self._config.damaged else p.CONTESTED

    # --- operations

    def _put_owned(self) -> None:
        """The next few of this writer's, which nobody has written before."""
        size = 1 + self._draw.randrange(MAX_BATCH)
        first = self._owned()
        self._next_owned_s = time.monotonic() + size / self._config.owned_s
        numbers = [p.number(p.OWNED, self._writer, which) for which in range(first, first + size)]
        for shape in p.SHAPES:
            batch = [page for page in numbers if p.segments_of(page) == shape]
            if batch:
                self._put(batch)
        self._board[self._writer, WRITTEN] = first + size

    def _put_shared(self) -> None:
        self._put(self._batch(p.CONTESTED if self._draw.random() < 0.5 else self._damaged()))

    def _put(self, batch: list[int]) -> None:
        up, start_s = self._pages.up(), time.monotonic()
        stored, written = self._pages.put(batch)
        end_s = time.monotonic()
        # true also means that it was there already, or that another is writing it: no acknowledgement of ours
        ours = written == len(batch)
        told = [(page, ok) for page, ok in zip(batch, stored, strict=True) if ours or not ok]
        self._write_down("put", up, start_s, end_s, self._config.client.put_timeout_s, told)

    def _get(self) -> None:
        batch = self._batch(self._zone())
        if batch:
            up, start_s = self._pages.up(), time.monotonic()
            self._read("get", up, start_s, batch, self._config.client.get_timeout_s)

    def _get_confirmed(self) -> None:
        batch = self._batch(self._zone())
        up, start_s = self._pages.up(), time.monotonic()
        there = self._pages.exists(batch) if batch else []
        batch = [page for page, ok in zip(batch, there, strict=True) if ok]
        if batch:
            limit_s = self._config.client.exists_timeout_s + self._config.client.get_timeout_s
            self._read("confirmed", up, start_s, batch, limit_s)

    def _read(self, kind: Kind, up: bool, start_s: float, batch: list[int], limit_s: float) -> None:
        read = self._pages.get(batch)
        end_s = time.monotonic()
        wrong = [
            page
            for page, ok, found in zip(batch, read.ok, read.pages, strict=True)
            if ok and not np.array_equal(found, p.content(p.key_of(self._config.seed, page), found.nbytes))
        ]
        told = list(zip(batch, read.ok, strict=True))
        self._write_down(kind, up, start_s, end_s, limit_s, told, wrong, read.corrupt)

    def _write_down(
        self,
        kind: Kind,
        up: bool,
        start_s: float,
        end_s: float,
        limit_s: float,
        told: list[tuple[int, bool]],
        wrong: list[int] | None = None,
        corrupt: int = 0,
    ) -> None:
        pages, ok = [page for page, _ in told], [ok for _, ok in told]
        record = Asked(kind, self._name, start_s, end_s, limit_s, pages, ok, wrong or [], corrupt, up)
        self._output.write(to_line(record))  # one write of an unbuffered file: whole, or cut short by a kill


def watch(name: str, output: BinaryIO, stop: threading.Event) -> None:
    """Write down when this process got no processor: it slept far too long and used hardly any time. A thread
    that kept the interpreter to itself would have used it.
    """
    while not stop.is_set():
        start_s, used_s = time.monotonic(), time.process_time()
        time.sleep(BEAT_S)
        end_s, used_s = time.monotonic(), time.process_time() - used_s
        if end_s - start_s > STARVED_S and used_s < (end_s - start_s) / 4:
            output.write(to_line(Starved(start_s, end_s, name)))


def main(config_path: str) -> None:
    config = read_config(config_path, WorkerConfig)
    stop = stop_at_sigterm()
    with Path(config.output).open("ab", buffering=0) as output:
        workers = [Worker(config, writer, output, stop) for writer in config.writers]
        for worker in workers:
            worker.connect()
        Path(config.ready).touch()
        threading.Thread(target=watch, args=(config.name, output, stop), daemon=True).start()
        run_threads([worker.run for worker in workers], stop)


if __name__ == "__main__":
    main(sys.argv[1])
