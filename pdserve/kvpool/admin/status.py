"""`pdserve pool status`: one node, or with --all every node that it knows."""

from __future__ import annotations

import contextlib
import time
from typing import Annotated

import click
import typer
from rich.table import Table

from pdserve.errors import PoolError
from pdserve.kvpool.admin.node_client import Asking, asks, in_parallel
from pdserve.kvpool.admin.tables import as_json, duration, make_console, make_table, share, size
from pdserve.kvpool.protocol.cluster_messages import ACTIVE, DEAD, LEAVING, LEFT, Member
from pdserve.kvpool.protocol.messages import NodeAddress, StatusReport

STATUS_NAMES = {ACTIVE: "active", LEAVING: "leaving", LEFT: "left", DEAD: "dead"}


@asks
def status(
    asking: Asking,
    everyone: Annotated[bool, typer.Option("--all", help="Show every node that this one knows.")] = False,
    watch: Annotated[
        float, typer.Option("--watch", metavar="SECONDS", min=0, help="Show it again each time; 0: once.")
    ] = 0.0,
) -> None:
    """Say how a node is: memory, pages, namespaces, tiers, members."""
    show = _status_of_all if everyone else _status_of_one
    if not watch:
        show(asking)
    while watch:
        if not asking.json:
            click.clear()
        with contextlib.suppress(typer.Exit):
            show(asking)
        time.sleep(watch)


def _status_of_one(asking: Asking) -> None:
    with asking.node() as node:
        report = node.status()
    if asking.json:
        typer.echo(as_json(report))
        return
    console = make_console()
    for table in _tables(report):
        console.print(table)


def _status_of_all(asking: Asking) -> None:
    nodes = asking.all_nodes()
    reports = in_parallel(nodes, lambda node: _ask(asking, node))
    if asking.json:
        rows = [
            {"node": node.node, "address": node.address, "error": str(report)}
            if isinstance(report, PoolError)
            else {"address": node.address, "error": None, **as_dict(report)}
            for node, report in zip(nodes, reports, strict=True)
        ]
        typer.echo(as_json(rows))
    else:
        console = make_console()
        console.print(nodes_table(nodes, reports))
        for report in reports:
            if isinstance(report, PoolError):
                console.print(str(report), soft_wrap=True)
    if all(isinstance(report, PoolError) for report in reports):
        raise typer.Exit(1)


def _ask(asking: Asking, node: NodeAddress) -> StatusReport:
    with asking.node(node.address) as client:
        return client.status()


def as_dict(report: StatusReport) -> dict[str, object]:
    """The report's fields by name."""
    return {name: getattr(report, name) for name in report.__struct_fields__ if name != "id"}


def nodes_table(nodes: list[NodeAddress], reports: list[StatusReport | PoolError]) -> Table:
    """One line for each node."""
    epochs = {report.epoch for report in reports if isinstance(report, StatusReport)}
    title = f"{len(nodes)} pool nodes, epoch {' and '.join(map(str, sorted(epochs))) or 'unknown'}"
    table = make_table(
        title, "node", "is", "capacity", "used", "below", "pages", "hits", "clients", "up", left=2
    )
    for node, report in zip(nodes, reports, strict=True):
        if isinstance(report, PoolError):
            table.add_row(node.node, "unreachable", *["-"] * 7)
            continue
        hits, misses = _hits(report)
        table.add_row(
            node.node,
            _standing(report),
            size(report.capacity_bytes),
            share(report.used_bytes + report.reserved_bytes, report.capacity_bytes),
            size(sum(tier.used_bytes for tier in report.tiers)) if report.tiers else "-",
            f"{report.pages:,}",
            share(hits, hits + misses),
            f"{report.connections:,}",
            duration(report.uptime_s),
        )
    return table


def _hits(report: StatusReport) -> tuple[int, int]:
    spaces = report.namespaces
    return sum(space.hits for space in spaces), sum(space.misses for space in spaces)


def _standing(report: StatusReport) -> str:
    """Of the node in its own eyes: its membership, and whether it still moves pages."""
    own = next((member for member in report.members if member.node == report.node), None)
    return "active" if own is None else _member_state(own, report.epoch)


def _member_state(member: Member, epoch: int) -> str:
    name = STATUS_NAMES.get(member.status, "unknown")
    if member.status != ACTIVE:
        return name
    return f"{name}, settled" if member.settled >= epoch else f"{name}, moving"


def _tables(report: StatusReport) -> list[Table]:
    tables = [_memory_table(report), _counts_table(report)]
    if report.namespaces:
        tables.append(_namespace_table(report))
    if report.tiers:
        tables.append(_tier_table(report))
    if len(report.members) > 1:
        tables.append(_member_table(report))
    return tables


def _memory_table(report: StatusReport) -> Table:
    title = f"pool node {report.node}, up {duration(report.uptime_s)}, {report.pages:,} pages"
    table = make_table(
        title,
        "capacity",
        "used",
        "free",
        "reserved",
        "quarantined",
        "clients",
        "pins",
        "waits",
        left=0,
        fold=-1,
    )
    sizes = (report.capacity_bytes, report.used_bytes, report.free_bytes, report.reserved_bytes)
    counts = (report.connections, report.pins, report.waiters)
    table.add_row(*map(size, sizes), size(report.quarantined_bytes), *(f"{count:,}" for count in counts))
    return table


def _counts_table(report: StatusReport) -> Table:
    """Two columns of counters, so that they fit a screen; zeros are left out."""
    table = make_table("since its start", "", "", "", "", left=1)
    table.show_header = False
    table.columns[2].justify = "left"
    counted = [(name, count) for name, count in report.counters.items() if count and name != "settled_epoch"]
    cells = [(name.removesuffix("_bytes").replace("_", " "), _count(name, count)) for name, count in counted]
    half = -(-len(cells) // 2)
    for row in range(half):
        right = cells[half + row] if half + row < len(cells) else ("", "")
        table.add_row(*cells[row], *right)
    if not cells:
        table.add_row("nothing yet", "", "", "")
    return table


def _count(name: str, count: int) -> str:
    return size(count) if name.endswith("_bytes") else f"{count:,}"


def _namespace_table(report: StatusReport) -> Table:
    table = make_table("namespaces", "name", "pages", "bytes", "quota", "hits", "misses", "rate", "evicted")
    for space in sorted(report.namespaces, key=lambda space: -space.page_bytes):
        quota = space.settings.quota_bytes
        table.add_row(
            space.name,
            f"{space.pages:,}",
            size(space.page_bytes),
            share(space.slot_bytes, quota) if quota else "-",
            f"{space.hits:,}",
            f"{space.misses:,}",
            share(space.hits, space.hits + space.misses),
            f"{space.evictions:,}",
        )
    return table


def _tier_table(report: StatusReport) -> Table:
    table = make_table("tiers below memory", "name", "kind", "pages", "used", "capacity", "writable", left=2)
    for tier in report.tiers:
        table.add_row(
            tier.name,
            tier.kind,
            f"{tier.pages:,}",
            size(tier.used_bytes),
            size(tier.capacity_bytes),
            "yes" if tier.writable else "no",
        )
    return table


def _member_table(report: StatusReport) -> Table:
    table = make_table(f"members, epoch {report.epoch}", "node", "address", "is", "weight", left=3, fold=1)
    for member in sorted(report.members, key=lambda member: member.node):
        table.add_row(member.node, member.address, _member_state(member, report.epoch), f"{member.weight:,}")
    return table
