"""A soak: nodes and clients under steady load, sampled every few seconds.

For a sample the load is held: clients end what they do and wait. So pins and reserved bytes must then be
none, and memory and descriptors are those of a process at rest.

Of each path to the pool there are two clients: one that stays, as a worker's does, and one that is renewed
every few seconds, threads and all, which shows what a connection leaves behind. glibc gives each new thread
one of several heaps, and it takes hours until all of these are as fragmented as they get, which hides what a
leak would add: the clients have one heap. The nodes run as anywhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from benchmarks.boards import Rows, new_rows
from benchmarks.node_processes import NodeProcess, client_of, pool_of
from benchmarks.processes import Child, clients
from benchmarks.soak import client as c
from benchmarks.soak.drift import Drift, drift
from benchmarks.stores import BenchError
from pdserve.errors import PoolError
from pdserve.kvpool.protocol.messages import DataPathChoice

logger = logging.getLogger(__name__)

Clients: TypeAlias = dict[str, Child]

PATHS: Final[tuple[DataPathChoice, ...]] = ("shm", "ucx", "tcp")
RENEW_S: Final = {"": 0.0, "-renewed": 10.0}  # a client process of each path, by what its name says
IDLE_WITHIN_S: Final = 20.0
REST_S: Final = 0.2  # after the last operation: releases have no reply
FAILED_SHARE: Final = 0.001  # of all operations: those that are cut when a client is renewed are half as many
OVERCOMMIT: Final = 2.0  # pages written over what fits: something is always evicted


class Sample(msgspec.Struct, frozen=True):
    """One process at one time; bytes, numbers. Those of nodes alone are 0 for clients."""

    at_s: float
    process: str
    anonymous_bytes: int  # private memory; the arena is shared memory and not in it
    descriptors: int
    threads: int
    pins: int = 0
    reserved_bytes: int = 0
    connections: int = 0


WATCHED: Final = ("anonymous_bytes", "descriptors", "threads", "pins", "reserved_bytes", "connections")


class Watched(msgspec.Struct, frozen=True):
    """One value of one process over the run."""

    process: str
    what: str
    drift: Drift
    passed: bool


class Soaked(msgspec.Struct, frozen=True):
    """What a soak showed. `pages_read`: by each client."""

    minutes: float
    nodes: int
    operations: int
    pages_read: dict[str, int]
    wrong: int
    failed: int
    watched: list[Watched]

    @property
    def complaints(self) -> list[str]:
        """What is wrong with the work itself; nothing can be told about growth where none was done."""
        idle = [name for name, pages in self.pages_read.items() if not pages]
        found = [f"{name} read no page" for name in idle] if self.pages_read else ["no client read a page"]
        if self.failed > FAILED_SHARE * self.operations:
            found.append(f"{self.failed:,} of {self.operations:,} operations failed")
        return [*found, f"{self.wrong} pages were wrong"] if self.wrong else found

    @property
    def passed(self) -> bool:
        return not self.complaints and all(one.passed for one in self.watched)


def soak(
    minutes: float,
    nodes: int,
    capacity_bytes: int,
    every_s: float,
    operations_s: float,
    directory: Path,
    say: Callable[[str], None],
) -> tuple[Soaked, list[Sample]]:
    """Run it in `directory`. Raises BenchError: a process died, too few samples."""
    with _running(nodes, capacity_bytes, operations_s, directory) as (processes, clients, board):
        samples: list[Sample] = []
        began = time.monotonic()
        told_s = began
        while time.monotonic() < began + minutes * 60:
            time.sleep(every_s)
            with _held(board, clients):
                samples += _sample(processes, clients, time.monotonic() - began)
            if time.monotonic() > told_s + 60:
                told_s = time.monotonic()
                say(f"{(told_s - began) / 60:.0f} minutes, {board[1:, c.OPERATIONS].sum():,} operations")
        totals = board[1:].sum(axis=0)
        read = board[1:, c.PAGES_READ].reshape(-1, c.THREADS).sum(axis=1)
    outcome = Soaked(
        minutes=minutes,
        nodes=nodes,
        operations=int(totals[c.OPERATIONS]),
        pages_read=dict(zip(clients, read.tolist(), strict=True)),
        wrong=int(totals[c.WRONG]),
        failed=int(board[1 :: c.THREADS, c.FAILED].sum()),
        watched=watched(samples),
    )
    return outcome, samples


def watched(samples: Sequence[Sample]) -> list[Watched]:
    """Each value of each process. Raises BenchError: too few samples."""
    found = []
    for process in dict.fromkeys(sample.process for sample in samples):
        of_process = [sample for sample in samples if sample.process == process]
        for what in WATCHED:
            values = [getattr(sample, what) for sample in of_process]
            if any(values) or what in ("pins", "reserved_bytes"):
                try:
                    grown = drift([sample.at_s for sample in of_process], values)
                except ValueError as error:
                    raise BenchError(str(error)) from error
                found.append(Watched(process, what, grown, grown.passed))
    return found


@contextmanager
def _running(
    nodes: int, capacity_bytes: int, operations_s: float, directory: Path
) -> Iterator[tuple[list[NodeProcess], Clients, Rows]]:
    board_path = directory / "board"
    board = new_rows(board_path, 1 + len(PATHS) * len(RENEW_S) * c.THREADS, c.COLUMNS)
    settings = {"capacity_bytes": capacity_bytes, "slab_bytes": 4 << 20, "keep": False}
    with pool_of(nodes, directory, settings) as processes:
        pages = int(nodes * capacity_bytes * OVERCOMMIT) // (16 * 1024)
        configs = [
            c.SoakClientConfig(
                name=f"client-{path}{kind}",
                client=client_of(processes, path),
                board=str(board_path),
                row=1 + index * c.THREADS,
                pages=pages // c.BATCH,
                operations_s=operations_s,
                renew_s=RENEW_S[kind],
            )
            for index, (path, kind) in enumerate(product(PATHS, RENEW_S))
        ]
        with clients(configs, directory, c.__name__, MALLOC_ARENA_MAX="1") as running:
            yield processes, running, board
        for node in processes:
            if not node.stop():
                raise BenchError(f"{node.name} ended badly: {node.log().strip().splitlines()[-1:]}")


@contextmanager
def _held(board: Rows, clients: Clients) -> Iterator[None]:
    """No operation is under way. Raises BenchError."""
    board[0, c.HOLD] = 1
    try:
        deadline = time.monotonic() + IDLE_WITHIN_S
        while not board[1:, c.IDLE].all():
            for name, client in clients.items():
                if not client.runs:
                    raise BenchError(f"{name} died")
            if time.monotonic() > deadline:
                raise BenchError(f"a client did not end its operation within {IDLE_WITHIN_S:.0f} s")
            time.sleep(0.01)
        time.sleep(REST_S)
        yield
    finally:
        board[0, c.HOLD] = 0


def _sample(nodes: list[NodeProcess], clients: Clients, at_s: float) -> list[Sample]:
    at_rest = {node.name: _process(node.pid) for node in nodes}  # before we connect to ask
    samples = [Sample(at_s, name, *_process(client.pid)) for name, client in clients.items()]
    for node in nodes:
        try:
            report = node.status()
        except PoolError as error:
            raise BenchError(f"{node.name}: {error}") from error
        held = report.pins, report.reserved_bytes, report.connections
        samples.append(Sample(at_s, node.name, *at_rest[node.name], *held))
    return samples


def _process(pid: int) -> tuple[int, int, int]:
    """Private memory in bytes, descriptors, threads: see proc(5)."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return int(lines["RssAnon"].split()[0]) * 1024, descriptors, int(lines["Threads"])
