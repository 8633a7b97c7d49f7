"""`pdserve bench soak`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from pdserve.bench.commands.options import conclude

if TYPE_CHECKING:
    from pdserve.bench.soak.run import Soaked


def soak(
    minutes: Annotated[float, typer.Option(min=0.1, help="How long; the goal is for 60.")] = 60.0,
    nodes: Annotated[int, typer.Option(min=1, help="Pool nodes.")] = 2,
    capacity: Annotated[
        str, typer.Option(help="Memory of each node; half of what is written fits.")
    ] = "128MiB",
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between samples.")] = 5.0,
    operations: Annotated[
        float, typer.Option(min=0.1, help="Operations a second of each of 8 threads.")
    ] = 50.0,
    plot: Annotated[Path | None, typer.Option(help="Draw the samples into this PNG file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Keep samples and logs in this directory.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The outcome as one JSON object.")] = False,
) -> None:
    """Steady load, and what grows under it: memory, descriptors, threads, pins (R16). Fails beyond 1 %,
    where a client read nothing, and where more than 0.1 % of the operations failed.
    """
    import msgspec

    from pdserve.bench.node_processes import stopped_cleanly
    from pdserve.bench.plot import plot_soak, pyplot
    from pdserve.bench.soak.run import soak as run
    from pdserve.sizes import parse_bytes

    if plot is not None:
        pyplot()  # before the work: is it there?
    with stopped_cleanly(), tempfile.TemporaryDirectory(prefix="pdserve-soak-") as directory:
        kept = out or Path(directory)
        kept.mkdir(parents=True, exist_ok=True)
        outcome, samples = run(
            minutes,
            nodes,
            parse_bytes(capacity),
            every,
            operations,
            kept,
            lambda line: typer.echo(line, err=True),
        )
        (kept / "samples.jsonl").write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in samples))
    if plot is not None:
        plot_soak(plot, samples, f"{minutes:g} minutes, {outcome.operations:,} operations")
    conclude(outcome, as_json, lambda: Console().print(_soak_table(outcome)))


def _soak_table(outcome: Soaked) -> Table:
    read = sum(outcome.pages_read.values())
    title = (
        f"{outcome.minutes:g} minutes: {outcome.operations:,} operations, {read:,} pages read, "
        f"{outcome.wrong} wrong, {outcome.failed} operations failed"
    )
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    if outcome.complaints:
        table.caption = f"MISS: {'; '.join(outcome.complaints)}"
    for name in ("process", "what", "first quarter", "last quarter", "growth", "≤ 1 %"):
        table.add_column(name, justify="left" if name in ("process", "what") else "right")
    for one in outcome.watched:
        first, last = (f"{value:,.1f}" for value in (one.drift.first, one.drift.last))
        growth, verdict = f"{one.drift.share:+.2%}", "pass" if one.passed else "MISS"
        table.add_row(one.process, one.what.replace("_", " "), first, last, growth, verdict)
    return table
