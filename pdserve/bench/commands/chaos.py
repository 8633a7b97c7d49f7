"""`pdserve bench chaos`."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pdserve.bench.commands.options import choices

if TYPE_CHECKING:
    pass


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
    from pdserve.bench.node_processes import stopped_cleanly
    from pdserve.sizes import parse_bytes

    if replay is not None:
        what = load_replay(replay)
    else:
        chosen = [kind for kind in KINDS if not kinds or kind in choices("kinds", kinds, KINDS)]
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
