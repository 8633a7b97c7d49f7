"""`pdserve bench policies` and `pdserve bench index`: what can be measured without a node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.bench.pool.policies import HitRate

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object per line, as measured.")]


def policies(
    trace: Annotated[
        Path | None, typer.Option(help="Replay this trace too: Mooncake's JSONL with hash_ids.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Policies, separated by commas; all by default.")] = "",
    capacity: Annotated[str, typer.Option(help="Capacities in blocks.")] = "1000,3000,10000,30000",
    generated: Annotated[bool, typer.Option(help="Replay the generated traces.")] = True,
    seed: Annotated[int, typer.Option(help="Of the generated traces.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Hit rates of the eviction policies on a skewed, a scanning and a multi-turn trace, and on one of
    yours.
    """
    import msgspec

    from pdserve.bench.pool.policies import replay
    from pdserve.bench.pool.traces import GENERATED, read_trace
    from pdserve.kvpool.policies import POLICIES, check_policy

    names = policy.split(",") if policy else list(POLICIES)
    for name in names:
        check_policy(name, 1.0)
    capacities = _numbers("capacity", capacity)
    traces = [(name, make(seed)) for name, make in GENERATED.items() if generated]
    if trace is not None:
        traces.append((trace.stem.replace("_", " "), read_trace(trace)))
    rates: list[HitRate] = []
    for label, requests in traces:
        for name in names:
            for blocks in capacities:
                rates.append(replay(label, requests, name, blocks))
                if as_json:
                    typer.echo(json.dumps(msgspec.structs.asdict(rates[-1])))
    if not as_json:
        _print_rates(rates, names)


def index(
    pages: Annotated[str, typer.Option(help="Numbers of pages.")] = "10000,100000,1000000,10000000",
    as_json: AsJson = False,
) -> None:
    """Memory per page and time per lookup of the node's index, at growing numbers of pages."""
    import msgspec

    from pdserve.bench.pool.index import measure_all

    figures = measure_all(_numbers("pages", pages))
    if as_json:
        for row in figures:
            typer.echo(json.dumps(msgspec.structs.asdict(row)))
        return
    table = _table("Index of a node", "pages", "bytes per page", "find ns", "miss ns", "write ns")
    for row in figures:
        values = (row.bytes_per_page, row.find_ns, row.miss_ns, row.write_ns)
        table.add_row(f"{row.pages:,}", *(f"{value:.0f}" for value in values))
    Console().print(table)


def _print_rates(rates: list[HitRate], names: list[str]) -> None:
    table = _table("Blocks hit by prefix, %", "trace", "blocks held", *names)
    by_row: dict[tuple[str, int], list[str]] = {}
    for rate in rates:
        by_row.setdefault((rate.trace, rate.capacity_blocks), []).append(f"{100 * rate.hit_rate:.1f}")
    for (trace, capacity), values in by_row.items():
        table.add_row(trace, f"{capacity:,}", *values)
    Console().print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name == "trace" else "right", no_wrap=True)
    return table


def _numbers(option: str, text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise ConfigError(f"--{option}: {text!r} is no list of positive numbers separated by commas")
    return [int(word) for word in words]
