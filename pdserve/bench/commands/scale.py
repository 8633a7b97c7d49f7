"""`pdserve bench scale`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.bench.commands import options
from pdserve.bench.commands.output import Output, say

if TYPE_CHECKING:
    from pdserve.bench.scale.figure import Figure


def scale(
    nodes: Annotated[str, typer.Option(help="Numbers of pool nodes.")] = "10,30,100,300,1000",
    plot: options.Plot = None,
    as_json: options.AsJson = False,
) -> None:
    """What grows with pool nodes, and with ten workers for each: gossip, views, the ring, the router's table,
    plans, health checks, etcd. Starts nothing: the nodes and workers are records.
    """
    from pdserve.bench.origin import in_words, provenance
    from pdserve.bench.scale.figure import KINDS
    from pdserve.bench.scale.pool import WORKERS_PER_NODE, pool_figures
    from pdserve.bench.scale.router import router_figures
    from pdserve.bench.tables import table

    sizes = options.numbers("nodes", nodes)
    output = Output(as_json, plot)
    figures: list[Figure] = []
    for size in sizes:
        say(f"{size} nodes, {WORKERS_PER_NODE * size} workers")
        for figure in (*pool_figures(size), *router_figures(WORKERS_PER_NODE * size)):
            figures.append(figure)
            output.row(figure)
    if plot is not None:
        from pdserve.bench.scale.picture import plot_scale

        plot_scale(plot, figures, in_words(provenance()))
    rows = []
    for what, kind in KINDS.items():
        values = [f"{one.value:,.3g}" for one in figures if one.what == what]
        rows.append((kind.title, kind.unit, *values))
    columns = ("", "unit", *(f"{size:,}" for size in sizes))
    output.show(table("Pool nodes, with ten workers each", columns, rows, left=("", "unit")), width=140)
