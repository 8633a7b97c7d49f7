"""`pdserve bench router`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pdserve.bench.commands.options import choices
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.bench.router.measure import Row

PEERS = "sglang-router,smg,vllm-router"
TABLE_WIDTH = 150


def router(
    streams: Annotated[str, typer.Option(help="Numbers of streams, separated by commas.")] = "1,16,64,512",
    long_streams: Annotated[
        int, typer.Option(min=0, help="Long streams of 20 chunks/s at the end; 0: none.")
    ] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each router at each number of streams.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each of the three phases of a turn.")] = 1.0,
    long_seconds: Annotated[float, typer.Option(min=0.1, help="Of the round of long streams.")] = 5.0,
    prompt_bytes: Annotated[int, typer.Option(min=0, help="Length of the requests' prompts.")] = 32,
    seed: Annotated[int, typer.Option(help="Which prompts, and in which order the routers take turns.")] = 1,
    peers: Annotated[
        str, typer.Option(help="Measured beside it where installed, separated by commas; empty: none.")
    ] = PEERS,
    plot: Annotated[Path | None, typer.Option(help="Draw the results into this PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line, as measured.")] = False,
) -> None:
    """What the router adds and what it can take, before mock workers, against direct access in the same run
    and beside other routers on the same core.
    """
    import msgspec

    from pdserve.bench.node_processes import stopped_cleanly
    from pdserve.bench.plot import plot_router, pyplot
    from pdserve.bench.router.contenders import installed
    from pdserve.bench.router.measure import Settings, measure

    wanted = choices("peers", peers, tuple(PEERS.split(","))) if peers else []
    settings = Settings(
        streams=_numbers(streams),
        long_streams=long_streams,
        rounds=rounds,
        seconds=seconds,
        long_seconds=long_seconds,
        prompt_bytes=prompt_bytes,
        seed=seed,
    )
    if plot is not None:
        pyplot()  # before the work: is it there?
    rows: list[Row] = []
    progress = Progress(console=Console(stderr=True), transient=True)
    with (
        stopped_cleanly(),
        tempfile.TemporaryDirectory(prefix="pdserve-router-") as directory,
        progress,
    ):
        said = progress.console.print
        there = [name for name in wanted if installed(name)]
        for name in wanted:
            if name not in there:
                said(f"{name} is not installed, so it is left out: pip install {name}")
        task = progress.add_task("turns", total=settings.turns * (2 + len(there)))
        for row in measure(there, settings, Path(directory), said, lambda: progress.advance(task)):
            rows.append(row)
            if as_json:
                typer.echo(json.dumps(msgspec.to_builtins(row)))
    if not as_json:
        console = Console()
        console.width = max(console.width, TABLE_WIDTH)
        console.print(table_of(rows))
    if plot is not None:
        plot_router(plot, rows)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(map(int, text.split(",")))
    except ValueError as error:
        raise ConfigError(f"--streams: {error}") from error
    if min(numbers) < 1:
        raise ConfigError(f"--streams: there is at least 1, found {min(numbers)}")
    return numbers


def table_of(rows: list[Row]) -> Table:
    """The rows for people."""
    title = "Routers on one core: what each adds, what it can take; times in ms, processor time in µs"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = {
        "first chunk +p50": "added_ttft_ms_p50",
        "+p99": "added_ttft_ms_p99",
        "chunk +p50": "added_chunk_ms_p50",
        "+p99 ": "added_chunk_ms_p99",
        "requests/s": "rps",
        "chunks/s": "chunks_per_s",
        "CPU/request": "cpu_us_per_request",
        "CPU/chunk": "cpu_us_per_chunk",
        "MB": "rss_mb",
        "load busy": "load_busy",
        "errors": "errors",
    }
    for name in ("streams", "router", *columns):
        table.add_column(name, justify="left" if name == "router" else "right", no_wrap=name == "router")
    for row in rows:
        values = (getattr(row, name) for name in columns.values())
        table.add_row(str(row.streams), row.router, *map(_figure, values))
        for other, times in row.rps_over.items():
            table.add_row("", f"  over {other}", "", "", "", "", f"{times:.2f} ×")
    return table


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:,.2f}"
