"""`python -m benchmarks policies`, `index` and `scale`: what can be measured without a node."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.commands import options
from benchmarks.commands.output import Output, say

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.pool.policies import HitRate
    from benchmarks.scale.figure import Figure


def policies(
    trace: Annotated[
        Path | None, typer.Option(help="Replay this trace too: Mooncake's JSON lines with hash_ids.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Policies, separated by commas. Default: all.")] = "",
    capacity: Annotated[str, typer.Option(help="Capacities in blocks.")] = "1000,3000,10000,30000",
    generated: Annotated[bool, typer.Option(help="Replay the generated traces.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of the generated traces.")] = 1,
    as_json: options.AsJson = False,
) -> None:
    """Hit rates of the eviction policies on a skewed, a scanning and a multi-turn trace, and on one of
    yours.
    """
    from benchmarks.pool.policies import replay
    from benchmarks.pool.traces import GENERATED, read_trace
    from pdserve.kvpool.policies import POLICIES, check_policy

    names = policy.split(",") if policy else list(POLICIES)
    for name in names:
        check_policy(name, 1.0)
    capacities = options.numbers("capacity", capacity)
    traces = [(name, make(seed)) for name, make in GENERATED.items() if generated]
    if trace is not None:
        traces.append((trace.stem.replace("_", " "), read_trace(trace)))
    output = Output(as_json)
    rates: list[HitRate] = []
    for label, requests in traces:
        for name in names:
            for blocks in capacities:
                rates.append(replay(label, requests, name, blocks))
                output.row(rates[-1])
    output.show(_rates_table(rates, names))


def _rates_table(rates: list[HitRate], names: list[str]) -> Table:
    from benchmarks.tables import table

    by_row: dict[tuple[str, str], list[str]] = {}
    for rate in rates:
        by_row.setdefault((rate.trace, f"{rate.capacity_blocks:,}"), []).append(f"{100 * rate.hit_rate:.1f}")
    rows = ((*which, *values) for which, values in by_row.items())
    columns = ("trace", "blocks held", *names)
    return table("Blocks hit by prefix, %", columns, rows, left=("trace",), no_wrap=True)


def index(
    pages: Annotated[str, typer.Option(help="Numbers of pages.")] = "10000,100000,1000000,10000000",
    as_json: options.AsJson = False,
) -> None:
    """Memory per page and time per lookup of the node's index, at growing numbers of pages."""
    from benchmarks.pool.index import measure_all
    from benchmarks.tables import table

    sizes = options.numbers("pages", pages)
    output = Output(as_json)
    rows = []
    for row in measure_all(sizes):
        output.row(row)
        values = (row.bytes_per_page, row.find_ns, row.miss_ns, row.write_ns)
        rows.append((f"{row.pages:,}", *(f"{value:.0f}" for value in values)))
    columns = ("pages", "bytes per page", "find ns", "miss ns", "write ns")
    output.show(table("Index of a node", columns, rows))


def scale(
    nodes: Annotated[str, typer.Option(help="Numbers of pool nodes.")] = "10,30,100,300,1000",
    plot: options.Plot = None,
    as_json: options.AsJson = False,
) -> None:
    """What grows with pool nodes, and with ten workers for each: gossip, views, the ring, the router's table,
    plans, health checks, etcd. Starts nothing: the nodes and workers are records.
    """
    from benchmarks.origin import in_words, provenance
    from benchmarks.scale.figure import KINDS
    from benchmarks.scale.pool import WORKERS_PER_NODE, pool_figures
    from benchmarks.scale.router import router_figures
    from benchmarks.tables import table

    sizes = options.numbers("nodes", nodes)
    output = Output(as_json, plot)
    figures: list[Figure] = []
    for size in sizes:
        say(f"{size} nodes, {WORKERS_PER_NODE * size} workers")
        for figure in (*pool_figures(size), *router_figures(WORKERS_PER_NODE * size)):
            figures.append(figure)
            output.row(figure)
    if plot is not None:
        from benchmarks.scale.picture import plot_scale

        plot_scale(plot, figures, in_words(provenance()))
    rows = []
    for what, kind in KINDS.items():
        values = [f"{one.value:,.3g}" for one in figures if one.what == what]
        rows.append((kind.title, kind.unit, *values))
    columns = ("", "unit", *(f"{size:,}" for size in sizes))
    output.show(table("Pool nodes, with ten workers each", columns, rows, left=("", "unit")), width=140)
