"""R7: the latency of a quiet namespace beside a loud one on the same node.

The quiet client gets one page at a time, at a steady rate. The time of a get counts from its planned moment.
There are two loud neighbours:

- *A tenant* has a limit in bytes per second. The asker (neighbour_process.py) requests ten times as much,
  without waiting for answers, and only pages that do not exist: they wait for the rate, and a miss is not
  charged. So the whole limit goes to clients that read and write over the data path and wait for answers.
- *A model load* reads pages of weights as fast as it can, with as many threads as a worker has for it. It has
  no limit, but the small weight that `pdserve weights push` gives.

The benchmark measures the node, not the sharing of one machine's processors. So the node has a processor that
the quiet client does not use, and the neighbours' processes run only on idle processors (SCHED_IDLE). Caches
and the kernel's network are still shared. A control measures their effect: the same load on another node.

Three kinds of phases take turns: alone, load on the other node, load on this node. So other work of the
machine affects all kinds equally. The result is the median p99 under load over the median p99 alone. There is
none if the neighbours requested less than planned, or a load read next to nothing.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec
import numpy as np

from benchmarks.node_processes import NodeProcess, client_of, pool_of
from benchmarks.pool.load_process import (
    CONNECT_TIMEOUT_S,
    Board,
    DriverConfig,
    driving,
    fill,
    make_keys,
    run_when_idle,
)
from benchmarks.pool.neighbour_process import AskerConfig
from benchmarks.stores import BenchError
from pdserve.kvpool.admin.node_client import NodeClient
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.policies import KEEP
from pdserve.kvpool.protocol.cluster_messages import NamespaceSettings, PutNamespace
from pdserve.kvpool.protocol.messages import DataPathChoice, Done
from pdserve.kvpool.weights.cutting import PAGE_BYTES
from pdserve.kvpool.weights.store import NAMESPACE, WEIGHT
from pdserve.kvpool.weights.streaming import BATCH_BYTES
from pdserve.kvpool.weights.streaming import THREADS as READ_THREADS

Neighbour: TypeAlias = Literal["none", "elsewhere", "here"]
Loud: TypeAlias = Literal["tenant", "weights"]
"""Who the neighbour is."""

GOAL: Final = 1.3
OVERLOAD: Final = 10.0
ENOUGH: Final = 0.95  # of what the neighbour is to ask for
QUIET_PAGE_BYTES: Final = 64 * 1024
QUIET_PAGES: Final = 512
QUIET_S: Final = 200.0  # gets a second
LOUD_PAGE_BYTES: Final = 256 * 1024
LOUD_PAGES: Final = 512
LOUD_BATCH: Final = 8
LOUD_PROCESSES: Final = 2
LOUD_THREADS: Final = 4
LOAD_PAGES: Final = 64
LOAD_BATCH: Final = BATCH_BYTES // PAGE_BYTES
LEAST_LOAD_BYTES_S: Final = 100e6
SETTLE_S: Final = 0.5  # at the start of a phase, not measured
REST_TIMEOUT_S: Final = 30.0
GEOMETRY: Final = {"quiet": "1"}
NODE_SETTINGS: Final = {"capacity_bytes": 512 << 20, "slab_bytes": 4 << 20, "keep": False}


class Phase(msgspec.Struct, frozen=True):
    """One stretch of the quiet client's gets, in µs; the neighbour's bytes per second, asked for and had.
    `neighbour`: none, on the other node, or on this one.
    """

    neighbour: Neighbour
    gets: int
    missed: int
    p50_us: float
    p99_us: float
    asked_bytes_s: float
    loud_bytes_s: float


class Quiet(msgspec.Struct, frozen=True):
    """What was seen. p99 are medians over phases; `ratio` is beside over alone, `control` elsewhere over
    alone. `limit_bytes_s`: 0 for a load, which has none.
    """

    path: str
    loud: Loud
    limit_bytes_s: float
    alone_p99_us: float
    elsewhere_p99_us: float
    beside_p99_us: float
    ratio: float
    control: float
    phases: list[Phase]

    @property
    def loud_enough(self) -> bool:
        """Whether the neighbour asked for what it should."""
        loud = [phase for phase in self.phases if phase.neighbour != "none"]
        if self.loud == "weights":
            return all(phase.loud_bytes_s >= LEAST_LOAD_BYTES_S for phase in loud)
        return all(phase.asked_bytes_s >= ENOUGH * OVERLOAD * self.limit_bytes_s for phase in loud)

    @property
    def passed(self) -> bool:
        return self.ratio <= GOAL and self.loud_enough and not any(phase.missed for phase in self.phases)


class _Place(msgspec.Struct, frozen=True):
    """A node, and a board that says whether the neighbour works on it."""

    node: NodeProcess
    board: Board
    page_bytes: int
    batch: int


def quiet(
    path: DataPathChoice, loud: Loud, limit_bytes_s: float, phases: int, phase_s: float, directory: Path
) -> Quiet:
    """Run it in `directory`. `limit_bytes_s`: of a tenant. Raises BenchError."""
    with ExitStack() as stack:
        here, elsewhere = (
            stack.enter_context(
                _tenant(name, path, limit_bytes_s, directory)
                if loud == "tenant"
                else _load(name, path, directory)
            )
            for name in ("here", "elsewhere")
        )
        _each_thread(elsewhere.node.pid, run_when_idle)
        stack.enter_context(_processors(here.node))
        client = PoolClient(
            client_of([here.node], path, connect_timeout_s=CONNECT_TIMEOUT_S), "quiet", GEOMETRY, name="quiet"
        )
        stack.enter_context(closing(client))
        keys = make_keys("quiet", QUIET_PAGES)
        fill(client, keys, QUIET_PAGE_BYTES)
        kinds: list[tuple[Neighbour, _Place | None]] = [
            ("none", None),
            ("elsewhere", elsewhere),
            ("here", here),
        ]
        boards = [here.board, elsewhere.board]
        found = [_phase(client, keys, *kind, boards, phase_s) for _ in range(phases) for kind in kinds]
    alone, control, beside = (
        statistics.median(phase.p99_us for phase in found if phase.neighbour == kind) for kind, _ in kinds
    )
    ratio, control_ratio = (round(p99 / alone, 3) for p99 in (beside, control))
    limit_bytes_s = limit_bytes_s if loud == "tenant" else 0.0
    return Quiet(path, loud, limit_bytes_s, alone, control, beside, ratio, control_ratio, found)


@contextmanager
def _tenant(name: str, path: DataPathChoice, limit_bytes_s: float, directory: Path) -> Iterator[_Place]:
    """A node of its own, and a tenant for it, who rests."""
    within = directory / name
    within.mkdir()
    with pool_of(1, within, NODE_SETTINGS) as (node,):
        _set(node, "loud", NamespaceSettings(bytes_s=limit_bytes_s))
        rows = LOUD_PROCESSES * LOUD_THREADS
        board = Board(within / "board", rows + 1)
        operations_s = limit_bytes_s * OVERLOAD / (LOUD_PAGE_BYTES * LOUD_BATCH)
        asker = AskerConfig(
            name="asker",
            address=node.address,
            namespace="loud",
            geometry=GEOMETRY,
            board=board.path,
            row=1 + rows,
            keys=make_keys("nowhere", LOUD_PAGES),
            page_bytes=LOUD_PAGE_BYTES,
            batch=LOUD_BATCH,
            operations_s=operations_s,
        )
        loud = [
            DriverConfig(
                name=f"loud{index}",
                client=client_of([node], path, connect_timeout_s=CONNECT_TIMEOUT_S),
                namespace="loud",
                geometry=GEOMETRY,
                board=board.path,
                row=1 + index * LOUD_THREADS,
                threads=LOUD_THREADS,
                keys=make_keys("loud", LOUD_PAGES),
                page_bytes=LOUD_PAGE_BYTES,
                batch=LOUD_BATCH,
                put_share=0.3,
                operations_s=operations_s / rows,
                yields=True,
            )
            for index in range(LOUD_PROCESSES)
        ]
        with driving(loud, within), driving([asker], within, "benchmarks.pool.neighbour_process"):
            yield _Place(node, board, LOUD_PAGE_BYTES, LOUD_BATCH)
            board.go(False)


@contextmanager
def _load(name: str, path: DataPathChoice, directory: Path) -> Iterator[_Place]:
    """A node of its own with weights, and a process that loads them again and again, and rests now."""
    within = directory / name
    within.mkdir()
    with pool_of(1, within, NODE_SETTINGS) as (node,):
        _set(node, NAMESPACE, NamespaceSettings(policy=KEEP, weight=WEIGHT))
        board = Board(within / "board", READ_THREADS + 1)
        keys = make_keys("weights", LOAD_PAGES)
        config = client_of([node], path, connect_timeout_s=CONNECT_TIMEOUT_S)
        with closing(PoolClient(config, NAMESPACE, GEOMETRY, name="push")) as client:
            fill(client, keys, PAGE_BYTES, LOAD_BATCH)
        loader = DriverConfig(
            name="load",
            client=config,
            namespace=NAMESPACE,
            geometry=GEOMETRY,
            board=board.path,
            row=1,
            threads=READ_THREADS,
            keys=keys,
            page_bytes=PAGE_BYTES,
            batch=LOAD_BATCH,
            yields=True,
        )
        with driving([loader], within):
            yield _Place(node, board, PAGE_BYTES, LOAD_BATCH)
            board.go(False)


@contextmanager
def _processors(node: NodeProcess) -> Iterator[None]:
    """One for the node, the others for this process, where there are two and more."""
    mine = os.sched_getaffinity(0)
    first, *others = sorted(mine)
    if not others:
        yield
        return
    try:
        _confine(node.pid, {first})
        _confine(os.getpid(), set(others))
        yield
    finally:
        _confine(os.getpid(), mine)


def _confine(pid: int, processors: set[int]) -> None:
    _each_thread(pid, lambda thread: os.sched_setaffinity(thread, processors))


def _each_thread(pid: int, place: Callable[[int], None]) -> None:
    """What they start is placed as they are. Raises BenchError."""
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(ProcessLookupError):  # it ended meanwhile
                place(int(task.name))
    except OSError as error:
        raise BenchError(f"process {pid} cannot be kept apart from the others: {error}") from error


def _set(node: NodeProcess, namespace: str, settings: NamespaceSettings) -> None:
    with closing(NodeClient(node.address)) as asked:
        asked.ask(lambda request_id: PutNamespace(request_id, namespace, settings), Done)


def _phase(
    client: PoolClient,
    keys: list[bytes],
    neighbour: Neighbour,
    place: _Place | None,
    boards: Sequence[Board],
    phase_s: float,
) -> Phase:
    if place is not None:
        place.board.go(True)
    time.sleep(SETTLE_S)
    before, began = _totals(boards), time.monotonic()
    page = np.empty(QUIET_PAGE_BYTES, np.uint8)
    times_s: list[float] = []
    missed = turn = 0
    next_s = began
    while next_s < began + phase_s:
        next_s += 1 / QUIET_S
        time.sleep(max(0.0, next_s - time.monotonic()))
        (ok,) = client.get([keys[turn % len(keys)]], [(page,)])
        times_s.append(time.monotonic() - next_s)
        missed += not ok
        turn += 1
    if not times_s:
        raise BenchError("a phase was too short for one get")
    took_s = time.monotonic() - began
    after = _totals(boards)
    if place is not None:
        place.board.go(False)
        _await_rest(boards)
    moved, asked = after["pages"] - before["pages"], after["operations"] - before["operations"]
    p50, p99 = (round(float(np.percentile(times_s, share)) * 1e6, 1) for share in (50, 99))
    page_bytes, batch = (0, 0) if place is None else (place.page_bytes, place.batch)
    asked_bytes_s, had_bytes_s = (round(count * page_bytes / took_s) for count in (asked * batch, moved))
    return Phase(neighbour, len(times_s), missed, p50, p99, asked_bytes_s, had_bytes_s)


def _await_rest(boards: Sequence[Board]) -> None:
    """Until the neighbours have had what they still waited for. Raises BenchError."""
    deadline_s = time.monotonic() + REST_TIMEOUT_S
    seen, before = _totals(boards), None
    while seen != before:
        if time.monotonic() > deadline_s:
            raise BenchError(f"the neighbour did not come to rest within {REST_TIMEOUT_S:.0f} s")
        time.sleep(SETTLE_S)
        seen, before = _totals(boards), seen


def _totals(boards: Sequence[Board]) -> Counter[str]:
    return sum((Counter(board.totals()) for board in boards), Counter())
