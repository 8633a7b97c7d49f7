"""`python -m benchmarks soak`, `chaos` and `hosts`: a pool under steady load, a pool and a cluster under faults."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.commands import options
from benchmarks.commands.options import choices
from benchmarks.commands.output import Output, failed_with, say, workplace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from benchmarks.hosts.figures import HostsFigures
    from benchmarks.soak.run import Soaked


def soak(
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Length of the run; the goal is defined for 60.")
    ] = 60.0,
    nodes: options.Nodes = 2,
    capacity: Annotated[
        str, typer.Option(help="Memory of each node; half of the written bytes fit.")
    ] = "128MiB",
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between samples.")] = 5.0,
    operations: Annotated[
        float, typer.Option(min=0.1, help="Operations per second of each of 12 threads.")
    ] = 50.0,
    plot: options.Plot = None,
    out: options.Out = None,
    as_json: options.AsJson = False,
) -> None:
    """Steady load, and what grows under it: memory, descriptors, threads, pins (R16). Fails beyond 1 %,
    where a client read nothing, and where more than 0.1 % of the operations failed.
    """
    import msgspec

    from benchmarks.plot import plot_soak
    from benchmarks.soak.run import soak as run
    from pdserve.sizes import parse_bytes

    capacity_bytes = parse_bytes(capacity)
    output = Output(as_json, plot)
    with workplace(out) as kept:
        outcome, samples = run(minutes, nodes, capacity_bytes, every, operations, kept, say)
        (kept / "samples.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(samples))
    if plot is not None:
        plot_soak(plot, samples, f"{minutes:g} minutes, {outcome.operations:,} operations")
    output.conclude(outcome, lambda: [_soak_table(outcome)])


def _soak_table(outcome: Soaked) -> Table:
    from benchmarks.tables import table

    read = sum(outcome.pages_read.values())
    title = (
        f"{outcome.minutes:g} minutes: {outcome.operations:,} operations, {read:,} pages read, "
        f"{outcome.wrong} wrong, {outcome.failed} operations failed"
    )
    rows = (
        (
            *(one.process, one.what.replace("_", " "), f"{one.drift.first:,.1f}", f"{one.drift.last:,.1f}"),
            *(f"{one.drift.share:+.2%}", "pass" if one.passed else "MISS"),
        )
        for one in outcome.watched
    )
    columns = ("process", "what", "first quarter", "last quarter", "growth", "≤ 1 %")
    caption = f"MISS: {'; '.join(outcome.complaints)}" if outcome.complaints else None
    return table(title, columns, rows, left=("process", "what"), caption=caption)


def chaos(
    seed: Annotated[int, typer.Option(help="Seed of the faults, their times and the clients' requests.")] = 1,
    minutes: Annotated[float, typer.Option(min=0.1, help="Length of the run.")] = 1.0,
    replay: Annotated[
        Path | None, typer.Option(help="Repeat the faults of this plan.json of an earlier run.")
    ] = None,
    kinds: Annotated[str, typer.Option(help="Kinds of faults, separated by commas; empty: all.")] = "",
    capacity: options.NodeCapacity = "128MiB",
    lease: Annotated[float, typer.Option(min=0.1, help="Leases of readers and writers, in seconds.")] = 5.0,
    checksum: Annotated[
        bool, typer.Option(help="Checksums of pages; without them the checks can be seen to fail.")
    ] = True,
    out: options.Out = None,
    as_json: options.AsJson = False,
) -> None:
    """Three nodes under faults, clients that check every byte; figures R1 to R14. Fails if one is missed."""
    import logging

    from benchmarks.chaos.field import Settings
    from benchmarks.chaos.plan import KINDS, make_plan
    from benchmarks.chaos.run import Replay, figures_table, load_replay, run
    from pdserve.sizes import parse_bytes

    if replay is not None:
        what = load_replay(replay)
    else:
        chosen = choices("kinds", kinds, KINDS) if kinds else KINDS
        plan = make_plan(seed, minutes, kinds=[kind for kind in KINDS if kind in chosen])
        what = Replay(plan, Settings(parse_bytes(capacity), lease, checksum))
    output = Output(as_json)
    with workplace(out) as kept:
        logging.basicConfig(filename=kept / "chaos.log", level=logging.INFO)
        outcome = run(what, kept, (lambda line: None) if as_json else say)
    output.conclude(outcome, lambda: [figures_table(outcome)])


def hosts(
    kinds: Annotated[str, typer.Option(help="Faults, separated by commas; empty: all.")] = "",
    clients: Annotated[int, typer.Option(min=1, help="Conversations at a time.")] = 8,
    fault: Annotated[float, typer.Option(min=1.0, help="Seconds of each fault.")] = 15.0,
    pause: Annotated[float, typer.Option(min=1.0, help="Seconds after each, to recover.")] = 30.0,
    ucx: Annotated[bool, typer.Option(help="Pages go between hosts by UCX; else by TCP.")] = True,
    out: options.Out = None,
    as_json: options.AsJson = False,
) -> None:
    """Routers, pool nodes and scripted workers on three hosts (network namespaces; takes root) under faults
    of network and hosts. Fails where an answer or a page was wrong, where a request failed or the hit rate
    fell although no host was lost, and where a request failed once all had recovered.
    """
    from benchmarks.hosts.faults import possible
    from benchmarks.hosts.run import run

    known = {one.name: one for one in possible()}
    chosen = choices("kinds", kinds, tuple(known)) if kinds else tuple(known)
    output = Output(as_json)
    rows = []
    with workplace(out) as kept:
        for row in run([known[name] for name in chosen], clients, fault, pause, kept, say, ucx=ucx):
            rows.append(row)
            output.row(row, passed=row.passed)
    output.show(_hosts_table(rows))
    failed_with([f"{row.fault}: {why}" for row in rows for why in row.complaints])


def _hosts_table(rows: Sequence[HostsFigures]) -> Table:
    from benchmarks.tables import table

    columns = (
        *("fault", "turns", "failed", "first token p50, ms", "p99, ms", "longest, s", "hit rate", "moved"),
        *("failed after", "hit rate after"),
    )
    return table("", columns, [row.cells for row in rows], left=("fault",))
