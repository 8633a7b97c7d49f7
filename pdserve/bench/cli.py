"""`pdserve bench`: measure the pool on this machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.bench.pool import PoolFigures

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Measure the pool.",
)

PEERS = ("ucx_perftest", "ucx_perftest_tuned")  # with UCX's own settings for TCP, and with ours


@app.callback()
def bench() -> None:
    """Measure the pool."""


@app.command()
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
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line, as measured.")] = False,
) -> None:
    """Put and get throughput of a pool node on this machine, against a plain memory copy in the same run."""
    # imported here: `pdserve bench --help` needs none of it
    from pdserve.bench.node import bench_node
    from pdserve.bench.peers import ucx_perftest_gbps
    from pdserve.bench.pool import Workload, measure
    from pdserve.kvpool.config import parse_bytes
    from pdserve.kvpool.transports.ucx import ucx_options

    sizes = _sizes(pages)
    paths = _choices("path", path, ("shm", "ucx"))
    checksums = [word == "on" for word in _choices("checksum", checksum, ("on", "off"))]
    peers = [_choices("peer", name, PEERS)[0] for name in peer or []]
    if parse_bytes(capacity) < 4 * batch * max(sizes):
        raise ConfigError(f"--capacity {capacity} holds no 4 batches of {batch} pages of {max(sizes)} bytes")
    figures: list[PoolFigures] = []
    with bench_node(capacity, slab_bytes=max(16 << 20, max(sizes))) as connect:
        for path_name in paths:
            for with_checksum in checksums:
                for page_bytes in sizes:
                    workload = Workload(
                        path_name, with_checksum, page_bytes, batch, seconds, parse_bytes(capacity)
                    )
                    with connect(path_name, with_checksum) as client:
                        figures.append(measure(client, workload))
                    if as_json:
                        typer.echo(json.dumps(_plain(figures[-1])))
    settings = {"ucx_perftest": {"TLS": "tcp"}, "ucx_perftest_tuned": ucx_options({})}
    peer_gbps = {(name, size): ucx_perftest_gbps(size, settings[name]) for name in peers for size in sizes}
    if as_json:
        for (name, size), gbps in peer_gbps.items():
            typer.echo(json.dumps({"peer": name, "page_bytes": size, "gbps": gbps}))
    else:
        _print_tables(figures, peer_gbps)


def _sizes(text: str) -> list[int]:
    from pdserve.kvpool.config import parse_bytes

    try:
        sizes = [parse_bytes(word) for word in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--pages: {error}") from error
    if min(sizes) < 64:
        raise ConfigError(f"--pages: pages have at least 64 bytes, found {min(sizes)}")
    return sizes


def _choices(option: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    words = text.split(",")
    for word in words:
        if word not in allowed:
            raise ConfigError(f"--{option}: '{word}' is not one of {', '.join(allowed)}")
    return words


def _plain(figures: PoolFigures) -> dict[str, Any]:
    import msgspec

    return {**msgspec.structs.asdict(figures), "checksum": "on" if figures.checksum else "off"}


def _print_tables(figures: list[PoolFigures], peer_gbps: dict[tuple[str, int], float]) -> None:
    console = Console()
    title = "Pool on this machine: GB/s, over a memory copy, and µs for getting one page"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("path", "sum", "page", "copy", "get", "put", "get/copy", "put/copy", "p50", "p99"):
        table.add_column(name, justify="left" if name in ("path", "sum") else "right", no_wrap=True)
    for row in figures:
        table.add_row(
            row.path,
            "on" if row.checksum else "off",
            _size_name(row.page_bytes),
            *(f"{value:.2f}" for value in (row.memcpy_gbps, row.get_gbps, row.put_gbps)),
            *(f"{value:.2f}" for value in (row.get_over_memcpy, row.put_over_memcpy)),
            *(f"{value:.0f}" for value in (row.single_get_p50_us, row.single_get_p99_us)),
        )
    console.print(table)
    for (name, size), gbps in peer_gbps.items():
        console.print(f"{name}, {_size_name(size)}: {gbps:.2f} GB/s")


def _size_name(size_bytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} B"
