"""`pdserve bench`: measure the pool on this machine."""

from __future__ import annotations

import itertools
import json
import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from pdserve.bench import offline
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

BANDWIDTH_PEERS = ("ucx_perftest", "ucx_perftest_tuned")  # with UCX's own settings for TCP, and with ours
STORE_PEERS = ("mooncake", "redis")
PEERS = (*STORE_PEERS, *BANDWIDTH_PEERS)


app.command()(offline.policies)
app.command()(offline.index)


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
    plot: Annotated[Path | None, typer.Option(help="Draw the results into this PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line, as measured.")] = False,
) -> None:
    """Put and get throughput of a pool node on this machine, against a plain memory copy in the same run, and
    against other stores where they are asked for.
    """
    # imported here: `pdserve bench --help` needs none of it
    from pdserve.bench.node import bench_node
    from pdserve.bench.peers.registry import perftest_gbps, stores
    from pdserve.bench.plot import plot_pool, pyplot
    from pdserve.bench.pool import Workload, measure
    from pdserve.bench.stores import PoolStore
    from pdserve.kvpool.config import parse_bytes

    sizes = _sizes(pages)
    paths = _choices("path", path, ("shm", "ucx"))
    checksums = [word == "on" for word in _choices("checksum", checksum, ("on", "off"))]
    peers = [_choices("peer", name, PEERS)[0] for name in peer or []]
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


@app.command()
def tier(
    path: Annotated[Path, typer.Argument(help="A directory on the SSD; its own are made and removed there.")],
    pages: Annotated[str, typer.Option(help="Page sizes, separated by commas.")] = "64KiB,1MiB,4MiB",
    size: Annotated[str, typer.Option(help="Bytes written and read per round.")] = "1GiB",
    threads: Annotated[int, typer.Option(min=1, help="Threads that read.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Medians are taken over so many.")] = 3,
    fio: Annotated[bool, typer.Option(help="Measure fio beside it, where it is installed.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line, as measured.")] = False,
) -> None:
    """Write and read throughput of the SSD tier, against plain direct I/O in the same run."""
    import msgspec

    from pdserve.bench.plot import size_name
    from pdserve.bench.tier import measure_tier
    from pdserve.kvpool.config import parse_bytes

    table = Table(title="SSD tier: GB/s", box=box.SIMPLE_HEAD)
    for name in ("page", "put", "plain write", "fio write", "load", "plain read", "fio read"):
        table.add_column(name, justify="right")
    for page_bytes in _sizes(pages):
        row = measure_tier(path, page_bytes, parse_bytes(size), threads, rounds, fio=fio)
        if as_json:
            typer.echo(json.dumps(msgspec.structs.asdict(row)))
        writes = (row.put_gbps, row.plain_write_gbps, row.fio_write_gbps)
        rates = (*writes, row.load_gbps, row.plain_read_gbps, row.fio_read_gbps)
        table.add_row(size_name(page_bytes), *(f"{rate:.2f}" if rate else "-" for rate in rates))
    if not as_json:
        Console().print(table)


@app.command()
def chaos(
    seed: Annotated[int, typer.Option(help="Which faults come when, and what clients ask.")] = 1,
    minutes: Annotated[float, typer.Option(min=0.1, help="How long.")] = 1.0,
    replay: Annotated[Path | None, typer.Option(help="Do as this run's plan.json says.")] = None,
    kinds: Annotated[str, typer.Option(help="Kinds of faults, separated by commas; empty: all.")] = "",
    capacity: Annotated[str, typer.Option(help="Memory of each node.")] = "128MiB",
    lease: Annotated[float, typer.Option(min=0.1, help="Leases of readers and writers, s.")] = 5.0,
    checksum: Annotated[bool, typer.Option(help="Off shows that the checks can fail.")] = True,
    out: Annotated[Path | None, typer.Option(help="Keep plan, records, figures and logs there.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The outcome as one JSON object.")] = False,
) -> None:
    """Three nodes under faults, clients that check every byte; figures R1 to R14. Fails if one is missed."""
    from pdserve.bench.chaos.field import Settings
    from pdserve.bench.chaos.plan import KINDS, make_plan
    from pdserve.bench.chaos.report import plain, table
    from pdserve.bench.chaos.run import Replay, load_replay, run
    from pdserve.bench.cluster import stopped_cleanly
    from pdserve.kvpool.config import parse_bytes

    if replay is not None:
        what = load_replay(replay)
    else:
        chosen = [kind for kind in KINDS if not kinds or kind in _choices("kinds", kinds, KINDS)]
        settings = Settings(parse_bytes(capacity), lease, checksum)
        what = Replay(make_plan(seed, minutes, kinds=chosen), settings)
    with stopped_cleanly(), tempfile.TemporaryDirectory(prefix="pdserve-chaos-") as directory:
        kept = out or Path(directory)
        kept.mkdir(parents=True, exist_ok=True)
        logging.basicConfig(filename=kept / "chaos.log", level=logging.INFO)
        outcome = run(what, kept, lambda line: None if as_json else typer.echo(line, err=True))
    if as_json:
        typer.echo(json.dumps(plain(outcome)))
    else:
        Console().print(table(outcome))
    if not outcome.passed:
        raise typer.Exit(1)
