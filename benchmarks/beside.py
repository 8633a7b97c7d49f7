"""What pages that move cost the steps of a scheduler, and steps the pages: both in one process, as SGLang has
them.

A thread takes steps of one kind without a pause, as a busy scheduler. Beside it this thread reads and writes
batches of pages, or sends a byte to another process and waits for its answer, which is the least that a call
to anybody costs the steps. Each round takes everything in turn, so a ratio's two sides are alike.

| steps | what they are |
|---|---|
| `python` | arithmetic of the interpreter, which it gives up only when it is asked to |
| `torch` | small operations of torch, each of which gives the interpreter up |
"""

from __future__ import annotations

import itertools
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
import numpy as np
import typer

from benchmarks.lib.report import FormatOption, Output, Table, choices, page_sizes, script, size_name
from benchmarks.pool import PATHS, Workload, bench_node
from pdserve.engine.sglang.children.entry import SWITCH_INTERVAL_S
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.protocol.base import KEY_BYTES
from pdserve.kvpool.protocol.page_bytes import aligned
from pdserve.sizes import parse_bytes
from tests.support.processes import HarnessError

Steps: TypeAlias = Literal["python", "torch"]
STEPS: Final[tuple[Steps, ...]] = ("python", "torch")
WORKS: Final = ("byte", "get", "put")
STEP_LOOPS: Final = 6_000
ECHO: Final = "import socket,sys\ns=socket.socket(fileno=int(sys.argv[1]))\nwhile d:=s.recv(1): s.sendall(d)"


class BesideFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One work beside one kind of steps. `speed`: of the work, over itself alone. `steps_mean`, `steps_p99`:
    of the steps, over themselves alone; `gbps`: of the work alone, 0 for a byte.
    """

    path: str
    page_bytes: int
    batch_pages: int
    steps: str
    work: str
    gbps: float
    speed: float
    steps_mean: float
    steps_p99: float


def main(
    pages: Annotated[str, typer.Option(help="Page sizes, separated by commas.")] = "1MiB",
    path: Annotated[str, typer.Option(help=f"Data paths: {', '.join(PATHS)}.")] = "shm,tcp",
    steps: Annotated[str, typer.Option(help=f"Kinds of steps: {', '.join(STEPS)}.")] = "python,torch",
    batch: Annotated[int, typer.Option(min=1, help="Pages per put and get.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; results are medians.")] = 7,
    seconds: Annotated[float, typer.Option(min=0.01, help="Time of each part of a round.")] = 0.3,
    capacity: Annotated[str, typer.Option(help="Memory of the pool node; 4 batches must fit.")] = "1GiB",
    format: FormatOption = "text",
) -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    output = Output(format)
    rows: list[BesideFigures] = []
    workloads = [
        Workload(name, True, size, batch, seconds, parse_bytes(capacity))
        for name, size in itertools.product(choices("path", path, PATHS), page_sizes(pages))
    ]
    with bench_node(workloads) as connect:
        for workload, kind in itertools.product(workloads, choices("steps", steps, STEPS)):
            with connect(workload.path, True) as client:
                figures = measure(client, workload, kind, rounds)
            for row in figures:
                rows.append(row)
                output.row(row)
    columns = ("path", "page", "steps", "work", "alone, GB/s", "speed", "steps' mean", "steps' p99")
    lines: list[Sequence[str]] = [
        (
            *(row.path, size_name(row.page_bytes), row.steps, row.work, f"{row.gbps:.2f}"),
            *(f"{ratio:.2f}" for ratio in (row.speed, row.steps_mean, row.steps_p99)),
        )
        for row in rows
    ]
    title = f"Beside a busy scheduler, over alone; batches of {batch} pages"
    output.show(Table(title, columns, lines, left=columns[:4]))


class Busy:
    """The thread that takes steps while it is asked to."""

    def __init__(self, kind: Steps) -> None:
        self._step = {"python": python_step, "torch": torch_step()}[kind]
        self._run = threading.Event()
        self._idle = threading.Event()
        self._took_s: list[float] = []
        threading.Thread(target=self._loop, daemon=True).start()

    @contextmanager
    def steps(self) -> Iterator[list[float]]:
        """How long the steps took that end in this block; they are in the list after it."""
        took_s: list[float] = []
        self._took_s = took_s
        self._idle.clear()
        self._run.set()
        yield took_s
        self._run.clear()
        self._idle.wait()

    def _loop(self) -> None:
        while True:
            self._idle.set()
            self._run.wait()
            took_s = self._took_s
            while self._run.is_set():
                began_s = time.perf_counter()
                self._step()
                took_s.append(time.perf_counter() - began_s)


def python_step() -> None:
    value = 1
    for number in range(STEP_LOOPS):
        value = (value * 31 + number) & 0xFFFF


def torch_step() -> Callable[[], None]:
    import torch

    torch.set_num_threads(1)
    matrix, rows = torch.rand(128, 128), torch.rand(8, 128)

    def step() -> None:
        hidden = rows
        for _ in range(20):
            hidden = torch.nn.functional.silu(hidden @ matrix) + rows
            hidden = hidden / hidden.norm()

    return step


def measure(client: PoolClient, workload: Workload, kind: Steps, rounds: int) -> list[BesideFigures]:
    """Raises HarnessError: a page was not moved."""
    busy, mover = Busy(kind), Mover(client, workload)
    alone: dict[str, list[float]] = {work: [] for work in WORKS}
    beside: dict[str, list[float]] = {work: [] for work in WORKS}
    mean: dict[str, list[float]] = {work: [] for work in WORKS}
    p99: dict[str, list[float]] = {work: [] for work in WORKS}
    with echo() as byte:
        works = {"byte": byte, "get": mover.get, "put": mover.put}
        for work in (*works.values(), *works.values()):
            work()
        for _ in range(rounds):
            for name, work in works.items():
                alone[name].append(_often(work, workload.seconds))
                with busy.steps() as undisturbed:
                    time.sleep(workload.seconds)
                with busy.steps() as disturbed:
                    beside[name].append(_often(work, workload.seconds))
                mean[name].append(statistics.mean(disturbed) / statistics.mean(undisturbed))
                p99[name].append(_p99(disturbed) / _p99(undisturbed))
    return [
        BesideFigures(
            path=workload.path,
            page_bytes=workload.page_bytes,
            batch_pages=workload.batch_pages,
            steps=kind,
            work=name,
            gbps=0.0 if name == "byte" else workload.batch_bytes / statistics.median(alone[name]) / 1e9,
            speed=statistics.median(a / b for a, b in zip(alone[name], beside[name], strict=True)),
            steps_mean=statistics.median(mean[name]),
            steps_p99=statistics.median(p99[name]),
        )
        for name in WORKS
    ]


class Mover:
    """Batches of pages between this process's memory and the pool."""

    def __init__(self, client: PoolClient, workload: Workload) -> None:
        self._client = client
        memory = aligned(2 * workload.batch_bytes).reshape(2, workload.batch_pages, -1)
        memory[:] = np.random.default_rng(0).integers(0, 256, workload.page_bytes, np.uint8)
        self._sources, self._targets = ([[page] for page in half] for half in memory)
        self._keys: list[list[bytes]] = []
        self._at = itertools.count()
        for _ in range(2):
            self.put()

    def put(self) -> None:
        random = os.urandom(KEY_BYTES * len(self._sources))  # each call gives the interpreter up
        keys = [random[start : start + KEY_BYTES] for start in range(0, len(random), KEY_BYTES)]
        if not all(self._client.put(keys, self._sources)):
            raise HarnessError("the pool did not store a page")
        self._keys = [*self._keys[-1:], keys]

    def get(self) -> None:
        if not all(self._client.get(self._keys[next(self._at) % 2], self._targets)):
            raise HarnessError("the pool did not return a page that was just put")


@contextmanager
def echo() -> Iterator[Callable[[], None]]:
    """A call to another process, of one byte."""
    ours, theirs = socket.socketpair()
    with ours:
        process = subprocess.Popen(
            [sys.executable, "-c", ECHO, str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        theirs.close()

        def call() -> None:
            ours.sendall(b"x")
            ours.recv(1)

        yield call
    process.wait(10.0)


def _often(work: Callable[[], None], seconds: float) -> float:
    """The median time of `work`, done again and again for so long."""
    took_s = []
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        began_s = time.perf_counter()
        work()
        took_s.append(time.perf_counter() - began_s)
    return statistics.median(took_s)


def _p99(took_s: list[float]) -> float:
    return sorted(took_s)[len(took_s) * 99 // 100]


if __name__ == "__main__":
    script(main, __doc__)
