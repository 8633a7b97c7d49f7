"""Pages moved beside a busy thread of the same process, as SGLang's scheduler is one.

The pages of a batch are moved in two ways: by a client in this process, and by a page mover, a process of its
own. Beside it a thread works in steps: of pure Python, which gives up the interpreter lock only when it is
asked to, or of small torch operations, which give it up now and then. A round measures in turn the steps
alone, and each way alone and beside the steps. Figures are medians over rounds.

SGLang on a GPU lies between the two kinds of steps: its scheduler is Python that launches kernels.
"""

from __future__ import annotations

import mmap
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Final, Literal, Protocol, TypeAlias

import msgspec
import numpy as np

from benchmarks.pool.speed import ROTATE_BYTES, Workload
from benchmarks.stores import BenchError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.mover.chain_client import ChainClient, Moved
from pdserve.kvpool.mover.client import MoverClient
from pdserve.kvpool.mover.host_pages import HostPages, HostPart, Segment
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.pages import KV

Steps: TypeAlias = Literal["none", "python", "torch"]
Way: TypeAlias = Literal["in process", "mover"]
WAYS: Final[tuple[Way, ...]] = ("in process", "mover")

PYTHON_STEP: Final = 20_000  # additions; about half a millisecond
TORCH_STEP: Final = 150  # operations on 64 numbers
SETTLE_S: Final = 0.2
RANK: Final = b"bench"


class BesideFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One way beside one kind of steps. Rates in 10^9 bytes per second; steps over those without moves."""

    path: str
    checksum: bool
    page_bytes: int
    batch_pages: int
    way: Way
    beside: Steps
    rounds: int
    get_gbps: float
    put_gbps: float
    get_over_alone: float = 1.0
    put_over_alone: float = 1.0
    step_ms: float = 0.0  # mean, without moves
    get_step_mean: float = 0.0
    get_step_p99: float = 0.0
    put_step_mean: float = 0.0
    put_step_p99: float = 0.0


class _Pages(Protocol):
    """A way to move the pages at some places of the host pool."""

    def get(self, keys: list[str], indices: bytes) -> Moved: ...
    def put(self, keys: list[str], indices: bytes) -> Moved: ...


class _InProcess:
    def __init__(self, client: PoolClient, memory: Bytes1D, page_bytes: int) -> None:
        self._chains = ChainClient(client, {KV: [RANK]})
        self._memory = memory
        self._page_bytes = page_bytes

    def get(self, keys: list[str], indices: bytes) -> Moved:
        return self._chains.get(keys, self._buffers(indices))

    def put(self, keys: list[str], indices: bytes) -> Moved:
        return self._chains.put(keys, self._buffers(indices))

    def _buffers(self, indices: bytes) -> list[tuple[Bytes1D]]:
        size = self._page_bytes
        return [(self._memory[i * size : (i + 1) * size],) for i in np.frombuffer(indices, np.int64).tolist()]


class _Thread(threading.Thread):
    """Works in steps until `stop`; `times_s`: how long each took."""

    def __init__(self, kind: Steps) -> None:
        super().__init__(daemon=True)
        self.times_s: list[float] = []
        self._stopped = False
        self._step = _python_step if kind == "python" else _torch_step()

    def run(self) -> None:
        clock, step, times_s = time.perf_counter, self._step, self.times_s
        while not self._stopped:
            began = clock()
            step()
            times_s.append(clock() - began)

    def stop(self) -> None:
        self._stopped = True
        self.join()


def measure_beside(
    client: PoolClient, workload: Workload, kinds: Sequence[Steps], rounds: int
) -> Iterator[BesideFigures]:
    """Both ways, alone and beside each kind of steps. Raises BenchError if a page was not moved."""
    size, batch = workload.page_bytes, workload.batch_pages
    sets = max(2, min(ROTATE_BYTES, workload.capacity_bytes // 4) // (size * batch))
    with ExitStack() as stack:
        fd = os.memfd_create("pdserve-bench")
        stack.callback(os.close, fd)
        os.ftruncate(fd, sets * batch * size)
        memory: Bytes1D = np.frombuffer(mmap.mmap(fd, sets * batch * size), np.uint8)
        memory[:] = np.resize(np.random.default_rng(0).integers(0, 256, size, np.uint8), memory.size)
        host = HostPages([(fd, memory.size)], [Segment(0, 0, size, size)], 1, sets * batch)
        mover = MoverClient(client.config, "bench", {"bench": "1"}, {KV: HostPart(host, (RANK,))})
        stack.enter_context(closing(mover))
        ways: dict[Way, _Pages] = {"in process": _InProcess(client, memory, size), "mover": mover}
        run = _Run(_Batches(sets, batch), workload.seconds, client.clear)
        which: list[Steps] = ["none", *(kind for kind in kinds if kind != "none")]
        for _ in range(rounds):
            for kind in which:
                run.steps_alone(kind)
                for way, pages in ways.items():
                    run.moves(kind, way, pages)
    for kind in which:
        for way in WAYS:
            yield run.figures(workload, way, kind, rounds)


class _Batches:
    """The batches of the host pool: their names and places."""

    def __init__(self, sets: int, pages: int) -> None:
        numbers = np.arange(sets * pages, dtype=np.int64).reshape(sets, pages)
        self.indices = [row.tobytes() for row in numbers]
        self.kept = [[os.urandom(32).hex() for _ in range(pages)] for _ in range(sets)]

    def new_names(self) -> list[str]:
        return [os.urandom(32).hex() for _ in self.kept[0]]


class _Run:
    """What was measured so far."""

    def __init__(self, batches: _Batches, seconds: float, clear: Callable[[], int]) -> None:
        self._batches = batches
        self._clear = clear
        self._seconds = seconds
        self._seen: dict[tuple[str, ...], list[float]] = defaultdict(list)

    def steps_alone(self, kind: Steps) -> None:
        """The steps, while no page moves."""
        if kind != "none":
            with self._steps(kind, "alone"):
                time.sleep(self._seconds)

    def moves(self, kind: Steps, way: Way, pages: _Pages) -> None:
        """Get and put, beside the steps."""
        batches = self._batches
        self._clear()  # beside the pages of earlier puts, a page to get could be evicted by the next
        for names, indices in zip(batches.kept, batches.indices, strict=True):
            _all(pages.put(names, indices))
        for what in ("get", "put"):
            with self._steps(kind, way, what):
                moved, spent_s = 0, 0.0
                while spent_s < self._seconds or not moved:
                    place = moved % len(batches.kept)
                    names = batches.kept[place] if what == "get" else batches.new_names()
                    began_s = time.perf_counter()
                    done = (pages.get if what == "get" else pages.put)(names, batches.indices[place])
                    spent_s += time.perf_counter() - began_s
                    _all(done)
                    moved += 1
            self._seen[kind, way, what].append(moved / spent_s)

    def figures(self, workload: Workload, way: Way, kind: Steps, rounds: int) -> BesideFigures:
        """Medians over the rounds."""
        batch_bytes = workload.page_bytes * workload.batch_pages
        get, put = (self._median(kind, way, what) for what in ("get", "put"))
        alone = [self._median("none", way, what) for what in ("get", "put")]
        steps: dict[str, float] = {}
        if kind != "none":
            mean, p99 = (self._median(kind, "alone", one) for one in ("mean", "p99"))
            steps["step_ms"] = round(mean * 1e3, 3)
            for what in ("get", "put"):
                steps[f"{what}_step_mean"] = round(self._median(kind, way, what, "mean") / mean, 3)
                steps[f"{what}_step_p99"] = round(self._median(kind, way, what, "p99") / p99, 3)
        return BesideFigures(
            path=workload.path,
            checksum=workload.checksum,
            page_bytes=workload.page_bytes,
            batch_pages=workload.batch_pages,
            way=way,
            beside=kind,
            rounds=rounds,
            get_gbps=round(get * batch_bytes / 1e9, 3),
            put_gbps=round(put * batch_bytes / 1e9, 3),
            get_over_alone=round(get / alone[0], 3),
            put_over_alone=round(put / alone[1], 3),
            **steps,
        )

    @contextmanager
    def _steps(self, kind: Steps, *name: str) -> Iterator[None]:
        """Another thread works in steps meanwhile."""
        if kind == "none":
            yield
            return
        thread = _Thread(kind)
        thread.start()
        time.sleep(SETTLE_S)
        began = len(thread.times_s)
        try:
            yield
        finally:
            thread.stop()
        times_s = thread.times_s[began:] or thread.times_s
        self._seen[kind, *name, "mean"].append(statistics.fmean(times_s))
        self._seen[kind, *name, "p99"].append(float(np.percentile(times_s, 99)))

    def _median(self, *name: str) -> float:
        return statistics.median(self._seen[name])


def _all(moved: Moved) -> None:
    if not all(moved.done):
        raise BenchError("the pool did not move a page: is its capacity large enough, and the node well?")


def _python_step() -> None:
    total = 0
    for number in range(PYTHON_STEP):
        total += number & 3


def _torch_step() -> Callable[[], None]:
    import torch

    torch.set_num_threads(1)
    numbers = torch.ones(64)

    def step() -> None:
        for _ in range(TORCH_STEP):
            numbers + 1

    return step
