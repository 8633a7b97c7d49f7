"""`python -m benchmarks router`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol, TypeAlias, TypeVar

import typer

from benchmarks.commands import options
from benchmarks.commands.output import Output, workplace

if TYPE_CHECKING:
    from benchmarks.router.measure import Row
    from benchmarks.router.other_loads import OtherSettings

PEERS = "sglang-router,smg,vllm-router"
TABLE_WIDTH = 150
LIMIT = 0.9
"""A load that uses more of its cores than this may be what limits the rate."""
COLUMNS: Final = {
    "first chunk +p50": "added_ttft_ms_p50",
    "+p99": "added_ttft_ms_p99",
    "chunk +p50": "added_chunk_ms_p50",
    "+p99 ": "added_chunk_ms_p99",
    "requests/s": "rps",
    "chunks/s": "chunks_per_s",
    "CPU/request": "cpu_us_per_request",
    "CPU/chunk": "cpu_us_per_chunk",
    "MB": "rss_mb",
    "idle KB": "idle_kb",
    "load busy": "load_busy",
    "errors": "errors",
}

OTHER_COLUMNS: Final = {
    "connections": "connections",
    "requests/s": "rps",
    "CPU/request": "cpu_us_per_request",
    "CPU/chunk": "cpu_us_per_chunk",
    "MB": "rss_mb",
    "load busy": "load_busy",
    "errors": "errors",
}


R = TypeVar("R")


class Measuring(Protocol):
    """What is to be measured."""

    def turns(self, peers: int) -> int:
        """Of all routers, with so many others."""
        ...


Tls: TypeAlias = Annotated[
    bool, typer.Option("--tls", help="Measure pdserve's router a second time, with TLS to its workers.")
]
Unix: TypeAlias = Annotated[
    bool,
    typer.Option("--unix", help="Measure pdserve's router a second time, with Unix sockets to its workers."),
]
Redis: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--redis",
        help="Measure pdserve's router a second time, sharing sessions and tenants' limits with another "
        "router over Redis.",
    ),
]
OtherLoads: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--other-loads",
        help="Measure instead long bodies, pipelined requests and two processes at 16 connections, and the "
        "memory of idle connections and 5,000 streams.",
    ),
]


def router(
    streams: Annotated[str, typer.Option(help="Numbers of streams, separated by commas.")] = "1,16,64,512",
    long_streams: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Long streams of 20 chunks/s at the end; 0: none. By default 1000; with --other-loads 5000, "
            "of one chunk/s.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each router at each number of streams.")] = 3,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Seconds of each of the three phases of a run.")
    ] = 1.0,
    long_seconds: Annotated[float, typer.Option(min=0.1, help="Seconds of the round of long streams.")] = 5.0,
    idle: Annotated[
        int, typer.Option(min=0, help="Idle connections after the long streams; 0: none.")
    ] = 10_000,
    prompt_bytes: Annotated[int, typer.Option(min=0, help="Length of the requests' prompts.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of the prompts and of the order of routers.")] = 1,
    peers: Annotated[
        str, typer.Option(help="Other routers to measure if installed, separated by commas; empty: none.")
    ] = PEERS,
    tls: Tls = False,
    unix: Unix = False,
    redis: Redis = False,
    other_loads: OtherLoads = False,
    plot: options.Plot = None,
    as_json: options.AsJson = False,
) -> None:
    """What the router adds and what it can take, before mock workers, against direct access in the same run
    and beside other routers on the same core.
    """
    from benchmarks.plot import plot_router
    from benchmarks.router.measure import Settings, measure
    from benchmarks.router.other_loads import OtherSettings

    wanted = options.choices("peers", peers, tuple(PEERS.split(","))) if peers else []
    shared: dict[str, Any] = {
        "rounds": rounds,
        "seconds": seconds,
        "long_seconds": long_seconds,
        "idle": idle,
        "seed": seed,
    }
    numbers = tuple(options.numbers("streams", streams))
    output = Output(as_json, plot)
    if other_loads:
        others = OtherSettings(**shared, long_streams=5000 if long_streams is None else long_streams)
        _show_others(output, others, wanted)
        return
    settings = Settings(
        **shared,
        streams=numbers,
        long_streams=1000 if long_streams is None else long_streams,
        prompt_bytes=prompt_bytes,
        tls=tls,
        unix=unix,
        redis=redis,
    )
    rows = _collected(output, wanted, settings, measure)
    _show(output, rows)
    if plot is not None:
        plot_router(plot, rows)


def _collected(
    output: Output, wanted: Sequence[str], settings: Measuring, measuring: Callable[..., Iterator[R]]
) -> list[R]:
    """The rows of a measurement, printed as they come. `measuring`: as `measure.measure`."""
    from rich.console import Console
    from rich.progress import Progress

    rows = []
    progress = Progress(console=Console(stderr=True), transient=True)
    with workplace() as directory, progress:
        said = progress.console.print
        there = _installed(wanted, said)
        task = progress.add_task("turns", total=settings.turns(len(there)))
        for row in measuring(there, settings, directory, said, lambda: progress.advance(task)):
            rows.append(row)
            output.row(row)
    return rows


def _show(output: Output, rows: list[Row]) -> None:
    from benchmarks.tables import table

    title = "Routers on one core: what each adds, what it can take; times in ms, processor time in µs"
    shown = table(title, ("streams", "router", *COLUMNS), _cells(rows), left=("router",))
    output.show(shown, width=TABLE_WIDTH)


def _show_others(output: Output, settings: OtherSettings, wanted: Sequence[str]) -> None:
    from benchmarks.router.other_loads import measure_others
    from benchmarks.tables import table

    rows = _collected(output, wanted, settings, measure_others)
    cells = (
        (row.load, row.router, *(_figure(getattr(row, name)) for name in OTHER_COLUMNS.values()))
        for row in rows
    )
    title = "Routers under other loads; processor time in µs"
    shown = table(title, ("load", "router", *OTHER_COLUMNS), cells, left=("load", "router"))
    output.show(shown, width=TABLE_WIDTH)


def _installed(wanted: Sequence[str], say: Callable[[str], object]) -> list[str]:
    from benchmarks.router.contenders import installed

    there = [name for name in wanted if installed(name)]
    for name in wanted:
        if name not in there:
            say(f"{name} is not installed, so it is left out: pip install {name}")
    return there


def _cells(rows: list[Row]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        values = (getattr(row, name) for name in COLUMNS.values())
        yield (str(row.streams), row.router, *map(_figure, values))
        if row.load_busy >= LIMIT:
            yield ("", "  the load may be the limit")
        for other, times in row.rps_over.items():
            yield ("", f"  over {other}", "", "", "", "", f"{times:.2f} ×")


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:,.2f}"
