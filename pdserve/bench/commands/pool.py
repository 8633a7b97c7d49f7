"""`pdserve bench pool`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from pdserve.bench.commands.options import choices, page_sizes
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.bench.pool.speed import PoolFigures


BANDWIDTH_PEERS = ("ucx_perftest", "ucx_perftest_tuned")  # with UCX's own settings for TCP, and with ours
STORE_PEERS = ("mooncake", "redis")
PEERS = (*STORE_PEERS, *BANDWIDTH_PEERS)


def pool(
    pages: Annotated[str, typer.Option(help="Page sizes, separated by commas.")] = "64KiB,1MiB,4MiB",
    path: Annotated[str, typer.Option(help="Data paths: shm, ucx.")] = "shm,ucx",
    checksum: Annotated[str, typer.Option(help="With checksums or without: on, off.")] = "on,off",
    batch: Annotated[int, typer.Option(min=1, help="Pages per put and get.")] = 32,
    seconds: Annotated[float, typer.Option(min=0, help="Time per line of the table, at least.")] = 3.0,
    capacity: Annotated[str, typer.Option(help="Memory of the pool node; 4 batches must fit.")] = "1GiB",
    peer: Annotated[
        list[str] | None, typer.Option(help=f"Measure this beside the pool: {', '.join(PEERS)}.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the results into this PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line, as measured.")] = False,
) -> None:
    """Put and get throughput of a pool node on this machine, against a plain memory copy in the same run, and
    against other stores where they are asked for.
    """
    # imported here: `pdserve bench --help` needs none of it
    from pdserve.bench.peers.registry import perftest_gbps, stores
    from pdserve.bench.plot import plot_pool, pyplot
    from pdserve.bench.pool.own_node import bench_node
    from pdserve.bench.pool.speed import Workload, measure
    from pdserve.bench.stores import PoolStore
    from pdserve.sizes import parse_bytes

    sizes = page_sizes(pages)
    paths = choices("path", path, ("shm", "ucx"))
    checksums = [word == "on" for word in choices("checksum", checksum, ("on", "off"))]
    peers = [choices("peer", name, PEERS)[0] for name in peer or []]
    capacity_bytes = parse_bytes(capacity)
    if capacity_bytes < 4 * batch * max(sizes):
        raise ConfigError(f"--capacity {capacity} holds no 4 batches of {batch} pages of {max(sizes)} bytes")
    if plot is not None:
        pyplot()  # before the work: is it there?
    figures: list[PoolFigures] = []
    beside = {
        (name, size): perftest_gbps(name, size) for name in peers if name in BANDWIDTH_PEERS for size in sizes
    }
    with (
        stores([name for name in peers if name in STORE_PEERS], capacity_bytes) as peer_stores,
        bench_node(capacity, slab_bytes=max(16 << 20, max(sizes))) as connect,
    ):
        for path_name, with_checksum, size in itertools.product(paths, checksums, sizes):
            workload = Workload(path_name, with_checksum, size, batch, seconds, capacity_bytes)
            with connect(path_name, with_checksum) as client:
                figures.append(measure(PoolStore(client), workload, peer_stores))
            if as_json:
                typer.echo(json.dumps(_plain(figures[-1])))
    if as_json:
        for (name, size), gbps in beside.items():
            typer.echo(json.dumps({"peer": name, "page_bytes": size, "gbps": gbps}))
    else:
        _print_tables(figures, beside)
    if plot is not None:
        plot_pool(plot, figures, beside, f"Batches of {batch} pages, medians, one machine, one run")


def _plain(figures: PoolFigures) -> dict[str, Any]:
    import msgspec

    whole: dict[str, Any] = msgspec.to_builtins(figures)
    return {**whole, "checksum": "on" if figures.checksum else "off"}


def _print_tables(figures: list[PoolFigures], beside: dict[tuple[str, int], float]) -> None:
    from pdserve.bench.plot import size_name

    console = Console()
    title = "Pool on this machine: GB/s, over a memory copy, and µs for getting one page"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = ("copy", "get", "put", "get/copy", "put/copy", "p50", "p99")
    for name in ("path", "sum", "page", *columns):
        table.add_column(name, justify="left" if name in ("path", "sum") else "right", no_wrap=True)
    for row in figures:
        table.add_row(
            row.path,
            "on" if row.checksum else "off",
            size_name(row.page_bytes),
            *(f"{value:.2f}" for value in (row.memcpy_gbps, row.get_gbps, row.put_gbps)),
            *(f"{value:.2f}" for value in (row.get_over_memcpy, row.put_over_memcpy)),
            *(f"{value:.0f}" for value in (row.single_get_p50_us, row.single_get_p99_us)),
        )
    console.print(table)
    if figures[0].peers:
        console.print(_peers_table(figures))
    for (name, size), gbps in beside.items():
        console.print(f"{name}, {size_name(size)}: {gbps:.2f} GB/s")


def _peers_table(figures: list[PoolFigures]) -> Table:
    from pdserve.bench.plot import size_name

    title = "Stores beside it in the same rounds: GB/s, and the pool over them"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("path", "sum", "page", "peer", "get", "put", "pool get", "pool put"):
        left = name in ("path", "sum", "peer")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for row in figures:
        for name, peer in row.peers.items():
            table.add_row(
                row.path,
                "on" if row.checksum else "off",
                size_name(row.page_bytes),
                name,
                *(f"{gbps:.2f}" for gbps in (peer.get_gbps, peer.put_gbps)),
                f"{row.get_gbps / peer.get_gbps:.1f} ×",
                f"{row.put_gbps / peer.put_gbps:.1f} ×",
            )
    return table
