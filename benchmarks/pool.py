"""How fast a pool node moves pages on this machine: put and get, against a plain memory copy in the same run,
and against what is asked for (`--peer`): Mooncake Store; `sockets` and `ucx`, which move the same cold pages
by plain calls and do nothing else (`plain_store`); and `ucx_perftest`, which moves one hot buffer.

One client process, one pool node. A round is, one after the other: a NumPy copy of a batch (memcpy), then for
each store, in an order that turns from round to round, a put of a batch under new keys and a get of a batch
that was put a while ago. Figures are medians over rounds, so whatever else the machine does hits all alike.
Batches take turns among buffers and pages that are together larger than a CPU's cache.

"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
import typer

from benchmarks.lib.report import (
    FormatOption,
    Output,
    Table,
    choices,
    page_sizes,
    script,
    size_name,
    workplace,
)
from benchmarks.peers import PageStore, PoolStore, mooncake_store, ucx_perftest_gbps
from benchmarks.plain_store import WAYS, plain_store
from pdserve.errors import ConfigError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.protocol.base import KEY_BYTES
from pdserve.kvpool.protocol.messages import DataPathChoice
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers
from pdserve.security.tls import TlsConfig
from pdserve.sizes import parse_bytes
from tests.support.certificates import Authority
from tests.support.kvpool.node_processes import NodeProcess, client_of, pool_of
from tests.support.processes import HarnessError

BenchPath: TypeAlias = Literal["shm", "ucx", "tcp", "tcp-tls"]
PATHS: Final[tuple[BenchPath, ...]] = ("shm", "ucx", "tcp", "tcp-tls")
PEERS: Final = ("mooncake", *WAYS, "ucx_perftest")
ON_OFF: Final = ("on", "off")
ROTATE_BYTES: Final = 256 * 1024 * 1024  # touched before one is touched again
MAX_SETS: Final = 128
MIN_ROUNDS: Final = 5
WARM_UP_ROUNDS: Final = 3
SINGLE_GETS: Final = 1000
TIMEOUTS: Final = {"connect_timeout_s": 10.0, "get_timeout_s": 60.0, "put_timeout_s": 60.0}

PageSets: TypeAlias = list[list[PageBuffers]]
Connect: TypeAlias = Callable[[BenchPath, bool], AbstractContextManager[PoolClient]]


@dataclass(frozen=True)
class Workload:
    """What to measure with one client. `capacity_bytes`: of the pool; what is got must be there."""

    path: BenchPath
    checksum: bool
    page_bytes: int
    batch_pages: int
    seconds: float
    capacity_bytes: int

    @property
    def batch_bytes(self) -> int:
        return self.page_bytes * self.batch_pages


def main(
    pages: Annotated[str, typer.Option(help="Page sizes, separated by commas.")] = "64KiB,1MiB,4MiB",
    path: Annotated[str, typer.Option(help=f"Data paths: {', '.join(PATHS)}.")] = "shm,ucx,tcp,tcp-tls",
    checksum: Annotated[str, typer.Option(help="With checksums (on) or without (off).")] = "on,off",
    batch: Annotated[int, typer.Option(min=1, help="Pages per put and get.")] = 32,
    seconds: Annotated[
        float, typer.Option(min=0, help="Least time per line of the table, in seconds.")
    ] = 3.0,
    capacity: Annotated[str, typer.Option(help="Memory of the pool node; 4 batches must fit.")] = "1GiB",
    peer: Annotated[
        list[str] | None, typer.Option(help=f"Measure beside it, each given once: {', '.join(PEERS)}.")
    ] = None,
    format: FormatOption = "text",
) -> None:
    sizes, capacity_bytes = page_sizes(pages), parse_bytes(capacity)
    peers = choices("peer", ",".join(peer), PEERS) if peer else []
    if capacity_bytes < 4 * batch * max(sizes):
        raise ConfigError(f"--capacity {capacity} holds no 4 batches of {batch} pages of {max(sizes)} bytes")
    each = itertools.product(choices("path", path, PATHS), choices("checksum", checksum, ON_OFF), sizes)
    workloads = [
        Workload(name, word == "on", size, batch, seconds, capacity_bytes) for name, word, size in each
    ]
    output = Output(format)
    _speed(output, workloads, peers)


@contextmanager
def bench_node(workloads: Sequence[Workload]) -> Iterator[Connect]:
    """A node for these workloads, and one more with certificates, each started when it is first needed;
    yields `connect(path, checksum)`, where "tcp-tls" is TCP with TLS. Raises HarnessError.
    """
    largest = max(workload.page_bytes for workload in workloads)
    settings = {
        "capacity_bytes": workloads[0].capacity_bytes,
        "page_bytes": largest,
        "keep": False,
    }
    with workplace() as directory, ExitStack() as stack:

        @cache
        def certificates() -> TlsConfig:
            return Authority(directory).host("127.0.0.1")

        @cache
        def started(with_tls: bool) -> NodeProcess:
            tls = _tls_table(certificates()) if with_tls else {}
            (node,) = stack.enter_context(
                pool_of(1, _made(directory / f"node{with_tls}"), {**settings, **tls})
            )
            stack.callback(node.stop)
            return node

        @contextmanager
        def connect(path: BenchPath, checksum: bool) -> Iterator[PoolClient]:
            node, with_tls = started(path == "tcp-tls"), path == "tcp-tls"
            tls: dict[str, Any] = {"tls": certificates()} if with_tls else {}
            data_path: DataPathChoice = "tcp" if path == "tcp-tls" else path
            config = client_of([node], data_path, checksum=checksum, **tls, **TIMEOUTS)
            with closing(PoolClient(config, "bench", {"bench": "1"}, name="bench")) as client:
                if (problem := client.check()[node.name]) is not None:
                    raise HarnessError(str(problem)) from problem
                yield client
                client.clear()

        yield connect


def _made(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    return directory


def _tls_table(tls: TlsConfig) -> dict[str, Any]:
    return {"tls": {"certificate": str(tls.certificate), "key": str(tls.key), "ca": str(tls.ca)}}


# --- one client: put and get


class PoolFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One line of results. Rates in 10^9 bytes per second, medians; latencies of getting a single page.
    `peers`: (get, put) of another store in the same rounds.
    """

    path: str
    checksum: bool
    page_bytes: int
    batch_pages: int
    rounds: int
    memcpy_gbps: float
    get_gbps: float
    put_gbps: float
    get_over_memcpy: float
    put_over_memcpy: float
    single_get_p50_us: float
    single_get_p99_us: float
    peers: dict[str, tuple[float, float]] = {}

    @property
    def cells(self) -> Sequence[str]:
        what = (self.path, ON_OFF[not self.checksum], size_name(self.page_bytes))
        rates = (self.memcpy_gbps, self.get_gbps, self.put_gbps, self.get_over_memcpy, self.put_over_memcpy)
        return (*what, *(f"{rate:.2f}" for rate in rates))


def _speed(output: Output, workloads: Sequence[Workload], peers: Sequence[str]) -> None:
    rows: list[PoolFigures] = []
    for size in dict.fromkeys(workload.page_bytes for workload in workloads if "ucx_perftest" in peers):
        gbps = ucx_perftest_gbps(size, {"TLS": "tcp"})
        output.row({"peer": "ucx_perftest", "page_bytes": size, "gbps": gbps})
        output.show(f"ucx_perftest, one hot buffer, {size_name(size)}: {gbps:.2f} GB/s")
    beside = mooncake_store(workloads[0].capacity_bytes) if "mooncake" in peers else nullcontext()
    with beside as store, bench_node(workloads) as connect:
        stores: dict[str, PageStore] = {} if store is None else {"mooncake": store}
        for workload in workloads:
            with connect(workload.path, workload.checksum) as client, ExitStack() as plain:
                room = workload.page_bytes, workload.capacity_bytes
                ways = {way: plain.enter_context(plain_store(way, *room)) for way in WAYS if way in peers}
                rows.append(measure(PoolStore(client), workload, stores | ways))
            output.row(rows[-1])
    lines = [(*row.cells, f"{row.single_get_p50_us:.0f}", f"{row.single_get_p99_us:.0f}") for row in rows]
    what = ("path", "sum", "page")
    columns = (*what, "copy", "get", "put", "get/copy", "put/copy", "get one, p50 µs", "p99")
    output.show(Table("Pool on this machine, GB/s, and over a memory copy", columns, lines, left=what))
    beside_it = [
        (
            *(*row.cells[:3], peer, f"{get:.2f}", f"{put:.2f}"),
            *(f"{row.get_gbps / get:.1f} ×", f"{row.put_gbps / put:.1f} ×"),
        )
        for row in rows
        for peer, (get, put) in row.peers.items()
    ]
    if beside_it:
        names = (*what, "peer", "get", "put", "pool get", "pool put")
        title = "Beside it in the same rounds, GB/s, and the pool over it"
        output.show(Table(title, names, beside_it, left=names[:4]))


@dataclass
class _Store:
    """A store in the measurement: what it holds, oldest first, and how long its operations took, in s."""

    store: PageStore
    stored: deque[list[bytes]] = field(default_factory=deque)
    read: list[bytes] = field(default_factory=list)  # the batch that was got last
    put_s: list[float] = field(default_factory=list)
    get_s: list[float] = field(default_factory=list)

    def round(self, pages: list[PageBuffers], copies: list[PageBuffers], pattern: Bytes1D, lag: int) -> None:
        """One put, and once `lag` batches are behind it one get: what was put just now is still in the
        cache.
        """
        keys = [os.urandom(KEY_BYTES) for _ in pages]
        for key, page in zip(keys, pages, strict=True):
            page[0][:KEY_BYTES] = np.frombuffer(key, np.uint8)  # no two pages alike
        self.put_s.append(_timed(self.store.put, keys, pages))
        self.stored.append(keys)
        if len(self.stored) > lag:
            self.read = self.stored.popleft()
            self.get_s.append(_timed(self.store.get, self.read, copies))
            _verify(self.read, copies, pattern, whole=len(self.get_s) <= WARM_UP_ROUNDS)
            self.store.forget(self.read)

    def gbps(self, batch_bytes: int) -> tuple[float, float]:
        """Get and put."""
        return _gbps(self.get_s, batch_bytes), _gbps(self.put_s, batch_bytes)


def measure(pool: PageStore, workload: Workload, peers: Mapping[str, PageStore] | None = None) -> PoolFigures:
    """Run the workload. Raises HarnessError if a store did not keep or return what it was given."""
    pattern = np.random.default_rng(0).integers(0, 256, workload.page_bytes, np.uint8)
    source_blocks, source_sets = _page_sets(workload, pattern)
    target_blocks, target_sets = _page_sets(workload, pattern)
    sources, targets = itertools.cycle(source_sets), itertools.cycle(target_sets)
    ours = _Store(pool)
    beside = {name: _Store(store) for name, store in (peers or {}).items()}
    contenders = [ours, *beside.values()]
    copy_s: list[float] = []
    lag = min(len(source_sets) // 2, workload.capacity_bytes // workload.batch_bytes // 4)
    with ExitStack() as lent:
        for contender in contenders:
            lent.enter_context(contender.store.lend([*source_blocks, *target_blocks]))
        until = time.perf_counter() + workload.seconds
        while len(ours.get_s) < MIN_ROUNDS + WARM_UP_ROUNDS or time.perf_counter() < until:
            copy_s.append(_timed(_copy, next(sources), next(targets)))
            for contender in contenders:
                contender.round(next(sources), next(targets), pattern, lag)
            contenders.append(contenders.pop(0))
        copies = next(targets)
        singles = sorted(_timed(pool.get, ours.read[:1], copies[:1]) for _ in range(SINGLE_GETS))
        for contender in contenders:
            for keys in contender.stored:
                contender.store.forget(keys)
    size = workload.batch_bytes
    memcpy, (get, put) = _gbps(copy_s, size), ours.gbps(size)
    return PoolFigures(
        path=workload.path,
        checksum=workload.checksum,
        page_bytes=workload.page_bytes,
        batch_pages=workload.batch_pages,
        rounds=len(ours.get_s) - WARM_UP_ROUNDS,
        memcpy_gbps=round(memcpy, 3),
        get_gbps=round(get, 3),
        put_gbps=round(put, 3),
        get_over_memcpy=round(get / memcpy, 3),
        put_over_memcpy=round(put / memcpy, 3),
        single_get_p50_us=round(singles[len(singles) // 2] * 1e6, 1),
        single_get_p99_us=round(singles[len(singles) * 99 // 100] * 1e6, 1),
        peers={
            name: (round(get, 3), round(put, 3))
            for name, (get, put) in ((name, each.gbps(size)) for name, each in beside.items())
        },
    )


def _gbps(times_s: list[float], batch_bytes: int) -> float:
    return batch_bytes / statistics.median(times_s[WARM_UP_ROUNDS:]) / 1e9


def _page_sets(workload: Workload, pattern: Bytes1D) -> tuple[list[Bytes1D], PageSets]:
    """Batches of pages of one segment each, in memory that was touched: one block for each batch, and its
    pages.
    """
    count = min(MAX_SETS, max(2, -(-ROTATE_BYTES // workload.batch_bytes)))
    blocks = [np.tile(pattern, workload.batch_pages) for _ in range(count)]
    size = workload.page_bytes
    return blocks, [
        [(block[start : start + size],) for start in range(0, block.nbytes, size)] for block in blocks
    ]


def _timed(work: Callable[..., None], *arguments: object) -> float:
    began = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began


def _verify(keys: list[bytes], pages: list[PageBuffers], pattern: Bytes1D, *, whole: bool) -> None:
    """`whole` reads every byte; else only the keys, so that the next measurement does not begin with a cache
    that this emptied.
    """
    for key, (page,) in zip(keys, pages, strict=True):
        right = page[:KEY_BYTES].tobytes() == key
        if not right or (whole and not np.array_equal(page[KEY_BYTES:], pattern[KEY_BYTES:])):
            raise HarnessError("the pool returned other bytes than were put")


def _copy(pages: list[PageBuffers], targets: list[PageBuffers]) -> None:
    for page, target in zip(pages, targets, strict=True):
        np.copyto(target[0], page[0])


if __name__ == "__main__":
    script(main, __doc__)
