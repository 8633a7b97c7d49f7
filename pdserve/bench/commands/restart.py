"""`pdserve bench restart`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.bench.commands.options import conclude

if TYPE_CHECKING:
    from pdserve.bench.pool.restart import Restarts


def restart(
    pages: Annotated[int, typer.Option(min=1, help="Pages in the node, of 4 KiB each.")] = 1_000_000,
    rounds: Annotated[int, typer.Option(min=1, help="Kills and restarts.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the pages' keys.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="The outcome as one JSON object.")] = False,
) -> None:
    """Kill -9 and restart of a node full of pages: time to the first hit, pages kept (R8). Fails beyond 1 s,
    or below 99.9 % kept, or read of a sample.
    """
    from pdserve.bench.node_processes import stopped_cleanly
    from pdserve.bench.pool.restart import restart as run

    with stopped_cleanly(), tempfile.TemporaryDirectory(prefix="pdserve-restart-") as directory:
        outcome = run(pages, rounds, seed, Path(directory), lambda line: typer.echo(line, err=True))
    conclude(outcome, as_json, lambda: _show(outcome))


def _show(outcome: Restarts) -> None:
    times = ", ".join(f"{one.first_hit_s:.3f}" for one in outcome.restarts)
    typer.echo(f"{outcome.pages:,} pages; first hit {times} s after the start")
    typer.echo(f"median {outcome.first_hit_s:.3f} s (goal: 1 s)")
    kept = f"{outcome.kept:.3%} of the pages kept, {outcome.read:.3%} of a sample read (goal: 99.9 %)"
    kept += f", {outcome.wrong} wrong"
    typer.echo(f"{kept}: {'pass' if outcome.passed else 'MISS'}")
