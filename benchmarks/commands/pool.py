"""`python -m benchmarks pool` and `python -m benchmarks tier`: how fast a node and its SSD tier move pages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from benchmarks.commands import options
from benchmarks.commands.options import choices, numbers, page_sizes
from benchmarks.commands.output import Output, workplace
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.pool.beside import BesideFigures, Steps
    from benchmarks.pool.own_node import BenchPath
    from benchmarks.pool.speed import PoolFigures, Workload


BANDWIDTH_PEERS = (
    *("ucx_perftest", "ucx_perftest_tuned"),  # with UCX's own settings for TCP, and with ours
    *("sockets", "sockets_two", "sockets_zerocopy"),  # plain sockets: one lane, two, without a copy to send
)
STORE_PEERS = ("mooncake", "redis")
PEERS = (*STORE_PEERS, *BANDWIDTH_PEERS)
ON_OFF = ("on", "off")
BESIDE: Final[tuple[Steps, ...]] = ("none", "python", "torch")
PATHS: Final[tuple[BenchPath, ...]] = (*options.PATHS, "tcp-tls")


def pool(
    pages: options.PageSizes = "64KiB,1MiB,4MiB",
    path: Annotated[str, typer.Option(help=f"Data paths: {', '.join(PATHS)}.")] = "shm,ucx,tcp,tcp-tls",
    checksum: Annotated[str, typer.Option(help="With checksums (on) or without (off).")] = "on,off",
    batch: Annotated[int, typer.Option(min=1, help="Pages per put and get.")] = 32,
    seconds: Annotated[
        float, typer.Option(min=0, help="Least time per line of the table, in seconds.")
    ] = 3.0,
    capacity: Annotated[str, typer.Option(help="Memory of the pool node; 4 batches must fit.")] = "1GiB",
    peer: Annotated[
        list[str] | None, typer.Option(help=f"Another store to measure: {', '.join(PEERS)}.")
    ] = None,
    beside: Annotated[
        str | None,
        typer.Option(
            help="Measure instead how pages move beside a busy thread of the same process, and how its steps "
            f"go on: {', '.join(BESIDE)}."
        ),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            help="Measure instead so many processes at once, each with a page mover, as the ranks of a "
            "worker: numbers such as 1,4."
        ),
    ] = None,
    total: Annotated[str, typer.Option(help="With --ranks: bytes of all their pages together.")] = "1GiB",
    rounds: Annotated[
        int, typer.Option(min=1, help="With --beside and --ranks: rounds; results are medians.")
    ] = 3,
    control: Annotated[
        bool,
        typer.Option(
            "--control",
            help="Measure instead control messages and connects by Unix socket, TCP, and TCP with TLS.",
        ),
    ] = False,
    plot: options.Plot = None,
    as_json: options.AsJson = False,
) -> None:
    """Put and get throughput of a pool node on this machine, against a plain memory copy in the same run, and
    against other stores where they are asked for.
    """
    # imported here: `python -m benchmarks --help` needs none of it
    from benchmarks.plot import plot_pool
    from benchmarks.pool.speed import Workload
    from pdserve.sizes import parse_bytes

    sizes = page_sizes(pages)
    peers = [choices("peer", name, PEERS)[0] for name in peer or []]
    capacity_bytes = parse_bytes(capacity)
    if capacity_bytes < 4 * batch * max(sizes):
        raise ConfigError(f"--capacity {capacity} holds no 4 batches of {batch} pages of {max(sizes)} bytes")
    workloads = [
        Workload(name, word == "on", size, batch, seconds, capacity_bytes)
        for name, word, size in itertools.product(
            choices("path", path, PATHS), choices("checksum", checksum, ON_OFF), sizes
        )
    ]
    output = Output(as_json, plot)
    if control:
        _control(output, seconds)
    if beside is not None:
        _beside(output, workloads, choices("beside", beside, BESIDE), rounds, capacity)
    if ranks is not None:
        _ranks(output, workloads, numbers("ranks", ranks), parse_bytes(total), rounds, capacity)
    if beside is None and ranks is None and not control:
        figures, bandwidths = _speed(output, workloads, peers, capacity)
        if plot is not None:
            plot_pool(plot, figures, bandwidths, f"Batches of {batch} pages, medians, one machine, one run")


def _speed(
    output: Output, workloads: Sequence[Workload], peers: Sequence[str], capacity: str
) -> tuple[list[PoolFigures], dict[tuple[str, int], float]]:
    """Figures of the pool and the stores beside it; bandwidths of what is no store, by page size."""
    from benchmarks.peers.registry import bandwidth_gbps, stores
    from benchmarks.plot import size_name
    from benchmarks.pool.own_node import bench_node
    from benchmarks.pool.speed import measure
    from benchmarks.stores import PoolStore

    figures: list[PoolFigures] = []
    sizes = list(dict.fromkeys(workload.page_bytes for workload in workloads))
    bandwidths = {
        (name, size): bandwidth_gbps(name, size)
        for name in peers
        if name in BANDWIDTH_PEERS
        for size in sizes
    }
    with (
        stores([name for name in peers if name in STORE_PEERS], workloads[0].capacity_bytes) as peer_stores,
        bench_node(capacity, slab_bytes=max(16 << 20, max(sizes))) as connect,
    ):
        for workload in workloads:
            with connect(workload.path, workload.checksum) as client:
                figures.append(measure(PoolStore(client), workload, peer_stores))
            output.row(figures[-1], checksum=ON_OFF[not workload.checksum])
    for (name, size), gbps in bandwidths.items():
        output.row({"peer": name, "page_bytes": size, "gbps": gbps})
    output.show(*_pool_tables(figures))
    output.show(*(f"{name}, {size_name(size)}: {gbps:.2f} GB/s" for (name, size), gbps in bandwidths.items()))
    return figures, bandwidths


def _beside(
    output: Output, workloads: Sequence[Workload], kinds: Sequence[Steps], rounds: int, capacity: str
) -> None:
    from benchmarks.plot import size_name
    from benchmarks.pool.beside import measure_beside
    from benchmarks.pool.own_node import bench_node
    from benchmarks.tables import table

    columns = ("way", "beside", "get", "put", "get/alone", "put/alone", "mean", "p99", "mean", "p99")
    largest = max(workload.page_bytes for workload in workloads)
    with bench_node(capacity, slab_bytes=max(16 << 20, largest)) as connect:
        for workload in workloads:
            with connect(workload.path, workload.checksum) as client:
                rows = list(measure_beside(client, workload, kinds, rounds))
            sums = ON_OFF[not workload.checksum]
            for row in rows:
                output.row(row, checksum=sums)
            what = f"{workload.batch_pages} pages of {size_name(workload.page_bytes)}"
            title = f"{workload.path}, checksums {sums}, {what}: GB/s, and the thread's steps (get, put)"
            lines = [_beside_row(row) for row in rows]
            output.show(table(title, columns, lines, left=("way", "beside"), no_wrap=True))


def _ranks(
    output: Output,
    workloads: Sequence[Workload],
    ranks: Sequence[int],
    total_bytes: int,
    rounds: int,
    capacity: str,
) -> None:
    from benchmarks.plot import size_name
    from benchmarks.pool.own_node import bench_node
    from benchmarks.pool.ranks.measure import measure_ranks
    from benchmarks.tables import table

    lines = []
    largest = max(workload.page_bytes for workload in workloads)
    with bench_node(capacity, slab_bytes=max(16 << 20, largest)) as connect:
        for workload, count in itertools.product(workloads, ranks):
            with connect(workload.path, workload.checksum) as client:
                row = measure_ranks(client, workload, count, total_bytes, rounds)
            sums = ON_OFF[not workload.checksum]
            output.row(row, checksum=sums)
            rates = (row.memcpy_gbps, row.get_gbps, row.put_gbps, row.get_over_memcpy, row.put_over_memcpy)
            which = (row.path, sums, size_name(row.page_bytes), str(count))
            lines.append((*which, *(f"{rate:.2f}" for rate in rates)))
    columns = ("path", "sum", "page", "ranks", "copy", "get", "put", "get/copy", "put/copy")
    title = "Ranks at once, each with a page mover: GB/s in sum"
    output.show(table(title, columns, lines, left=("path", "sum"), no_wrap=True))


def _control(output: Output, seconds: float) -> None:
    from benchmarks.pool.round_trip import round_trips
    from benchmarks.tables import table

    with workplace() as directory:
        rows = list(round_trips(seconds, directory))
    for row in rows:
        output.row(row)
    columns = ("path", "messages", "p50 µs", "p99 µs", "over TCP", "connects", "connect µs")
    lines = [
        (
            *(row.path, f"{row.messages:,}", f"{row.p50_us:.0f}", f"{row.p99_us:.0f}"),
            *(f"{row.over_tcp:.2f} ×", str(row.connects), f"{row.connect_p50_us:.0f}"),
        )
        for row in rows
    ]
    output.show(table("A control message and back", columns, lines, left=("path",)))


def _beside_row(row: BesideFigures) -> tuple[str, ...]:
    rates = (row.get_gbps, row.put_gbps, row.get_over_alone, row.put_over_alone)
    steps = (row.get_step_mean, row.get_step_p99, row.put_step_mean, row.put_step_p99)
    times = (f"{step:.2f}" if step else "-" for step in steps)
    return (row.way, row.beside, *(f"{rate:.2f}" for rate in rates), *times)


def _pool_tables(figures: list[PoolFigures]) -> Iterator[Table]:
    from benchmarks.plot import size_name
    from benchmarks.tables import table

    which = [(row.path, ON_OFF[not row.checksum], size_name(row.page_bytes)) for row in figures]
    rates = [
        (row.memcpy_gbps, row.get_gbps, row.put_gbps, row.get_over_memcpy, row.put_over_memcpy)
        for row in figures
    ]
    delays = [(row.single_get_p50_us, row.single_get_p99_us) for row in figures]
    yield table(
        "Pool on this machine: GB/s, over a memory copy, and µs for getting one page",
        ("path", "sum", "page", "copy", "get", "put", "get/copy", "put/copy", "p50", "p99"),
        (
            (*name, *(f"{gbps:.2f}" for gbps in of_row), *(f"{us:.0f}" for us in delay))
            for name, of_row, delay in zip(which, rates, delays, strict=True)
        ),
        left=("path", "sum"),
        no_wrap=True,
    )
    if figures[0].peers:
        yield table(
            "Stores beside it in the same rounds: GB/s, and the pool over them",
            ("path", "sum", "page", "peer", "get", "put", "pool get", "pool put"),
            (
                (
                    *(*name, peer, f"{its.get_gbps:.2f}", f"{its.put_gbps:.2f}"),
                    *(f"{row.get_gbps / its.get_gbps:.1f} ×", f"{row.put_gbps / its.put_gbps:.1f} ×"),
                )
                for name, row in zip(which, figures, strict=True)
                for peer, its in row.peers.items()
            ),
            left=("path", "sum", "peer"),
            no_wrap=True,
        )


def tier(
    path: Annotated[
        Path, typer.Argument(help="A directory on the SSD. Temporary directories are made and removed in it.")
    ],
    pages: options.PageSizes = "64KiB,1MiB,4MiB",
    size: Annotated[str, typer.Option(help="Bytes written and read per round.")] = "1GiB",
    threads: Annotated[int, typer.Option(min=1, help="Number of reading threads.")] = 4,
    rounds: Annotated[
        int, typer.Option(min=1, help="Number of rounds; results are medians over rounds.")
    ] = 3,
    fio: Annotated[bool, typer.Option(help="Measure fio too, if it is installed.")] = True,
    as_json: options.AsJson = False,
) -> None:
    """Write and read throughput of the SSD tier, against plain direct I/O in the same run."""
    from benchmarks.plot import size_name
    from benchmarks.pool.tier import measure_tier
    from benchmarks.tables import table
    from pdserve.sizes import parse_bytes

    sizes, total_bytes = page_sizes(pages), parse_bytes(size)
    output = Output(as_json)
    rows = []
    for page_bytes in sizes:
        row = measure_tier(path, page_bytes, total_bytes, threads, rounds, fio=fio)
        output.row(row)
        writes = (row.put_gbps, row.plain_write_gbps, row.fio_write_gbps)
        rates = (*writes, row.load_gbps, row.plain_read_gbps, row.fio_read_gbps)
        rows.append((size_name(page_bytes), *(f"{rate:.2f}" if rate else "-" for rate in rates)))
    columns = ("page", "put", "plain write", "fio write", "load", "plain read", "fio read")
    output.show(table("SSD tier: GB/s", columns, rows))


def codec(
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Directory of an SSD tier whose pages are measured; none: made pages."),
    ] = None,
    compression: Annotated[str, typer.Option(help="Codecs, separated by commas.")] = "zstd",
    pages: Annotated[int, typer.Option(min=1, help="Most pages of --from.")] = 64,
    page: Annotated[str, typer.Option(help="Size of made pages.")] = "1MiB",
    item_bytes: Annotated[
        int, typer.Option(min=1, max=8, help="Bytes of one number of the KV: 2 for bf16, 1 for fp8.")
    ] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; results are medians.")] = 3,
    as_json: options.AsJson = False,
) -> None:
    """Size and speed of pages that tiers store compressed, encrypted, or both, on one processor."""
    from benchmarks.pool.codec import kv_pages, measure_codec
    from benchmarks.tables import table
    from pdserve.sizes import parse_bytes

    output = Output(as_json)
    found = kv_pages(source, pages, parse_bytes(page))
    names = compression.split(",")
    kinds = [*((name, False) for name in names), ("", True), *((name, True) for name in names)]
    rows = []
    for name, encrypted in kinds:
        row = measure_codec(name, found, item_bytes, rounds, encrypted=encrypted)
        output.row(row)
        rows.append((row.codec, f"{row.ratio:.2f}", f"{row.store_gbps:.2f}", f"{row.load_gbps:.2f}"))
    columns = ("codec", "ratio", "store GB/s", "load GB/s")
    output.show(table(f"{len(found)} pages of {row.page_bytes} bytes", columns, rows, left=("codec",)))
