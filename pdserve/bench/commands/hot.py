"""`pdserve bench hot`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from pdserve.bench.commands.options import choices

if TYPE_CHECKING:
    from pdserve.kvpool.protocol.messages import DataPathChoice


def hot(
    replicas: Annotated[str, typer.Option(help="Runs with so many copies, separated by commas.")] = "0,2",
    path: Annotated[str, typer.Option(help="Data path of the readers: shm or ucx.")] = "ucx",
    nodes: Annotated[int, typer.Option(min=1, help="Pool nodes.")] = 3,
    readers: Annotated[int, typer.Option(min=1, help="Reader processes.")] = 4,
    pages: Annotated[int, typer.Option(min=1, help="Pages of the prefix, all of one owner.")] = 8,
    page: Annotated[str, typer.Option(help="Size of a page.")] = "256KiB",
    warm_up: Annotated[float, typer.Option(min=0, help="Seconds of reading before it counts.")] = 5.0,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds that count.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per run.")] = False,
) -> None:
    """Many readers of one hot prefix: the busiest node's share of reads, and throughput, by replicas."""
    import msgspec

    from pdserve.bench.node_processes import stopped_cleanly
    from pdserve.bench.pool.hot_pages import hot as run
    from pdserve.sizes import parse_bytes

    (chosen,) = choices("path", path, ("shm", "ucx"))
    copies = [int(word) for word in choices("replicas", replicas, tuple(map(str, range(16))))]
    table = Table(title="One hot prefix", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("replicas", "busiest node's share", "reads by node", "pages/s", "GB/s", "missed"):
        table.add_column(name, justify="right")
    for count in copies:
        with stopped_cleanly(), tempfile.TemporaryDirectory(prefix="pdserve-hot-") as directory:
            outcome = run(
                count,
                path=cast("DataPathChoice", chosen),
                nodes=nodes,
                readers=readers,
                prefix_pages=pages,
                page_bytes=parse_bytes(page),
                warm_up_s=warm_up,
                seconds=seconds,
                directory=Path(directory),
            )
        if as_json:
            typer.echo(json.dumps(msgspec.to_builtins(outcome)))
        reads = " ".join(f"{number:,}" for number in outcome.reads.values())
        rates = (f"{outcome.pages_s:,.0f}", f"{outcome.gbps:.2f}", str(outcome.missed))
        table.add_row(str(count), f"{outcome.busiest_share:.0%}", reads, *rates)
    if not as_json:
        Console().print(table)
