"""`pdserve pool top`: what the nodes are doing now, per node and per namespace.

Rates are the growth of counters between two samples. A node that restarted in between has none.
"""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table

from pdserve.kvpool.admin.node_client import Asking, asks
from pdserve.kvpool.admin.sampling import Nodes, Rates, Row, add, busiest
from pdserve.kvpool.admin.tables import as_json, make_console, make_table, rate, share, size
from pdserve.security.log_text import printable


@asks
def top(
    asking: Asking,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.05, help="Time between two samples.")
    ] = 1.0,
    namespaces: Annotated[
        int, typer.Option("--namespaces", min=1, help="Number of namespaces shown, the busiest ones.")
    ] = 10,
    once: Annotated[bool, typer.Option("--once", help="Take two samples, print them, and exit.")] = False,
) -> None:
    """Show operations, bytes and hits a second of every node and of the busiest namespaces."""
    seen = Nodes([asking.address], asking.token, asking.timeout_s, asking.tls)
    console = make_console()
    seen.sample()
    if once or asking.json or not console.is_terminal:
        while True:
            time.sleep(interval)
            rows = seen.sample()
            if asking.json:
                typer.echo(as_json(json_rows(rows, namespaces)))
            else:
                console.print(view(rows, namespaces))
            if once:
                return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            live.update(view(seen.sample(), namespaces), refresh=True)


def json_rows(rows: list[Row], namespaces: int) -> dict[str, object]:
    """For programs."""
    return {
        "nodes": [{**_fields(row.total), "error": row.error or None} for row in rows],
        "namespaces": [_fields(each) for each in busiest(rows, namespaces)],
    }


def _fields(one: Rates) -> dict[str, object]:
    return {**msgspec.structs.asdict(one), "hit_rate": one.hit_rate}


def view(rows: list[Row], namespaces: int) -> Group:
    """For people."""
    columns = ("ops/s", "read/s", "written/s", "hits", "evicted/s")
    nodes = make_table("pool nodes", "node", *columns, "used", "pages", "clients")
    for row in rows:
        if row.report is None:
            nodes.add_row(row.node.node, *["-"] * 8)
            continue
        report = row.report
        used = share(report.used_bytes + report.reserved_bytes, report.capacity_bytes)
        nodes.add_row(*_cells(row.total), used, f"{report.pages:,}", f"{report.connections:,}")
    if len(rows) > 1:
        nodes.add_section()
        nodes.add_row(*_cells(add("all", [row.total for row in rows])), "", "", "")
    errors = [printable(row.error) for row in rows if row.error]
    found = busiest(rows, namespaces)
    return Group(nodes, *errors, *([_namespaces(found, columns)] if found else []))


def _namespaces(found: list[Rates], columns: tuple[str, ...]) -> Table:
    table = make_table("busiest namespaces", "name", *columns)
    for space in found:
        table.add_row(*_cells(space))
    return table


def _cells(one: Rates) -> tuple[str, ...]:
    hit_rate = one.hit_rate
    return (
        one.name,
        rate(one.operations_s),
        size(one.read_bytes_s),
        size(one.written_bytes_s),
        "-" if hit_rate is None else share(hit_rate, 1.0),
        rate(one.evictions_s),
    )
