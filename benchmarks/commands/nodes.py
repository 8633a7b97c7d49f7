"""`python -m benchmarks quiet`, `hostile` and `restart`: how nodes share their time, and are back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from benchmarks.commands import options
from benchmarks.commands.output import Output, say, workplace

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.pool.quiet import Loud, Quiet
    from benchmarks.pool.restart import Restarts

LOUD: Final[tuple[Loud, ...]] = ("tenant", "weights")


def quiet(
    path: options.DataPath = "shm",
    loud: Annotated[
        str,
        typer.Option(help="Who is loud: tenant, at 10 times its limit; weights, a model that is loaded."),
    ] = "tenant",
    limit: Annotated[
        str,
        typer.Option(help="Limit of a tenant in bytes per second; it requests 10 times as much."),
    ] = "50MB",
    phases: Annotated[
        int, typer.Option(min=1, help="Phases of each kind: alone, load on another node, load on this node.")
    ] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of a phase.")] = 5.0,
    as_json: options.AsJson = False,
) -> None:
    """A quiet namespace beside a loud one: p99 over p99 alone (R7). Fails beyond 1.3."""
    from benchmarks.pool.quiet import quiet as run
    from pdserve.sizes import parse_bytes

    (chosen,) = options.choices("path", path, options.PATHS)
    (neighbour,) = options.choices("loud", loud, LOUD)
    limit_bytes_s = parse_bytes(limit)
    output = Output(as_json)
    with workplace() as directory:
        outcome = run(chosen, neighbour, limit_bytes_s, phases, seconds, directory)
    output.conclude(outcome, lambda: _quiet_shown(outcome))


def _quiet_shown(outcome: Quiet) -> list[Table | str]:
    from benchmarks.tables import table

    columns = ("neighbour", "gets", "missed", "p50 µs", "p99 µs", "asked MB/s", "had MB/s")
    rows = [
        (
            *(phase.neighbour, str(phase.gets), str(phase.missed)),
            *(f"{phase.p50_us:.0f}", f"{phase.p99_us:.0f}"),
            *(f"{rate / 1e6:.0f}" for rate in (phase.asked_bytes_s, phase.loud_bytes_s)),
        )
        for phase in outcome.phases
    ]
    verdict = "pass" if outcome.passed else "MISS"
    shown: list[Table | str] = [
        table("A quiet namespace's gets", columns, rows),
        f"p99 beside over alone: {outcome.ratio:.2f} (goal: at most 1.3, none missed): {verdict}",
        f"with the same load on another node: {outcome.control:.2f}; that much is this machine's",
    ]
    if not outcome.loud_enough:
        shown.append("the neighbour did less than it should: this machine is too busy to measure it")
    return shown


def hostile(
    connections: Annotated[int, typer.Option(min=1, help="Hostile connections.")] = 1000,
    phases: Annotated[int, typer.Option(min=1, help="Phases of each attack, in turn.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of a phase.")] = 2.0,
    as_json: options.AsJson = False,
) -> None:
    """Pool nodes and a router beside hostile connections of strangers, and of those with a token or key: p99
    of honest requests, memory, crashes.
    """
    from benchmarks.hostile.run import MEMORY_GOAL, P99_GOAL
    from benchmarks.hostile.run import hostile as run
    from benchmarks.tables import table

    output = Output(as_json)
    rows = []
    with workplace() as directory:
        for row in run(connections, phases, seconds, directory):
            rows.append(row)
            output.row(row)
    columns = (
        *("port", "beside", "honest", "requests", "missed", "p50 µs", "p99 µs", "p99 over alone"),
        *("memory MB", "memory over alone", "crashes"),
    )
    lines = [
        (
            *(row.port, row.who, row.honest, str(row.requests), str(row.missed)),
            *(f"{row.p50_us:.0f}", f"{row.p99_us:.0f}", f"{row.p99_over_alone:.2f}"),
            *(f"{row.memory_mb:.0f}", f"{row.memory_over_alone:.2f}", str(row.crashes)),
        )
        for row in rows
    ]
    verdict = "pass" if all(row.passed for row in rows) else "MISS"
    goals = f"p99 at most {P99_GOAL}, memory at most {MEMORY_GOAL}, none missed, no crash"
    shown = table(f"Beside {connections} hostile connections", columns, lines, left=columns[:3])
    output.show(shown, f"goals: {goals}: {verdict}", width=140)


def restart(
    pages: Annotated[int, typer.Option(min=1, help="Pages in the node, of 4 KiB each.")] = 1_000_000,
    rounds: Annotated[int, typer.Option(min=1, help="Kills and restarts.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the pages' keys.")] = 1,
    as_json: options.AsJson = False,
) -> None:
    """Kill -9 and restart of a node full of pages: time to the first hit, pages kept (R8). Fails beyond 1 s,
    or below 99.9 % kept, or read of a sample.
    """
    from benchmarks.pool.restart import restart as run

    output = Output(as_json)
    with workplace() as directory:
        outcome = run(pages, rounds, seed, directory, say)
    output.conclude(outcome, lambda: _restarts_shown(outcome))


def _restarts_shown(outcome: Restarts) -> list[str]:
    times = ", ".join(f"{one.first_hit_s:.3f}" for one in outcome.restarts)
    kept = f"{outcome.kept:.3%} of the pages kept, {outcome.read:.3%} of a sample read (goal: 99.9 %)"
    return [
        f"{outcome.pages:,} pages; first hit {times} s after the start",
        f"median {outcome.first_hit_s:.3f} s (goal: 1 s)",
        f"{kept}, {outcome.wrong} wrong: {'pass' if outcome.passed else 'MISS'}",
    ]
