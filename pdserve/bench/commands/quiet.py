"""`pdserve bench quiet`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from pdserve.bench.commands.options import choices, conclude

if TYPE_CHECKING:
    from pdserve.bench.pool.quiet import Quiet
    from pdserve.kvpool.protocol.messages import DataPathChoice


def quiet(
    path: Annotated[str, typer.Option(help="Data path of all clients: shm or ucx.")] = "shm",
    limit: Annotated[
        str, typer.Option(help="The loud namespace's bytes a second; it asks for 10 times.")
    ] = "50MB",
    phases: Annotated[
        int, typer.Option(min=1, help="Phases of each kind: alone, load on another node, on this one.")
    ] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of a phase.")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="The outcome as one JSON object.")] = False,
) -> None:
    """A quiet namespace beside one at 10 times its limit: p99 over p99 alone (R7). Fails beyond 1.3."""
    from pdserve.bench.node_processes import stopped_cleanly
    from pdserve.bench.pool.quiet import quiet as run
    from pdserve.sizes import parse_bytes

    (chosen,) = choices("path", path, ("shm", "ucx"))
    with stopped_cleanly(), tempfile.TemporaryDirectory(prefix="pdserve-quiet-") as directory:
        outcome = run(cast("DataPathChoice", chosen), parse_bytes(limit), phases, seconds, Path(directory))
    conclude(outcome, as_json, lambda: _show(outcome))


def _show(outcome: Quiet) -> None:
    table = Table(title="A quiet namespace's gets", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("neighbour", "gets", "missed", "p50 µs", "p99 µs", "asked MB/s", "had MB/s"):
        table.add_column(name, justify="right")
    for phase in outcome.phases:
        rates = (f"{rate / 1e6:.0f}" for rate in (phase.asked_bytes_s, phase.loud_bytes_s))
        numbers = (f"{phase.p50_us:.0f}", f"{phase.p99_us:.0f}", *rates)
        table.add_row(phase.neighbour, str(phase.gets), str(phase.missed), *numbers)
    Console().print(table)
    verdict = "pass" if outcome.passed else "MISS"
    typer.echo(f"p99 beside over alone: {outcome.ratio:.2f} (goal: at most 1.3, none missed): {verdict}")
    typer.echo(f"with the same load on another node: {outcome.control:.2f}; that much is this machine's")
    if not outcome.loud_enough:
        typer.echo(
            "the neighbour asked for less than 10 times its limit: this machine is too busy to measure it"
        )
