"""`pdserve bench tier`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from pdserve.bench.commands.options import page_sizes


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
    from pdserve.bench.pool.tier import measure_tier
    from pdserve.sizes import parse_bytes

    table = Table(title="SSD tier: GB/s", box=box.SIMPLE_HEAD)
    for name in ("page", "put", "plain write", "fio write", "load", "plain read", "fio read"):
        table.add_column(name, justify="right")
    for page_bytes in page_sizes(pages):
        row = measure_tier(path, page_bytes, parse_bytes(size), threads, rounds, fio=fio)
        if as_json:
            typer.echo(json.dumps(msgspec.structs.asdict(row)))
        writes = (row.put_gbps, row.plain_write_gbps, row.fio_write_gbps)
        rates = (*writes, row.load_gbps, row.plain_read_gbps, row.fio_read_gbps)
        table.add_row(size_name(page_bytes), *(f"{rate:.2f}" if rate else "-" for rate in rates))
    if not as_json:
        Console().print(table)
