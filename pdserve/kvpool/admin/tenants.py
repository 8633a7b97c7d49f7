"""`pdserve pool tenants` and `pdserve pool delete`: whose pages the pool has, and their end."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Final

import typer

from pdserve.errors import ConfigError, PoolError
from pdserve.kvpool.admin.node_client import Asking, asks, in_parallel
from pdserve.kvpool.admin.tables import as_json, complain, make_console, make_table, size
from pdserve.kvpool.namespaces.tenants import MARK, is_tenant_name, split
from pdserve.kvpool.protocol.cluster_messages import DEAD
from pdserve.kvpool.protocol.messages import Done, DropNamespace, NodeAddress, StatusReport

DELETE_S: Final = 4 * 70.0
"""A node answers after 64 s at most (core/erasures.py); it asks the others, then itself, all twice."""


@asks
def tenants(asking: Asking) -> None:
    """Show the bytes of each tenant's pages, over all models and nodes."""
    nodes = asking.all_nodes()
    reports = in_parallel(nodes, lambda node: _status(asking, node))
    found = Counter[tuple[str, str]]()
    for report in reports:
        for space in report.namespaces if isinstance(report, StatusReport) else ():
            tenant = split(space.name)[1]
            found[tenant, "memory"] += space.slot_bytes
            found[tenant, "tiers"] += space.tier_bytes
    held = {tenant: (found[tenant, "memory"], found[tenant, "tiers"]) for tenant, _ in found}
    late = {n.node: str(r) for n, r in zip(nodes, reports, strict=True) if isinstance(r, PoolError)}
    if asking.json:
        names = ("memory_bytes", "tier_bytes")
        told = {tenant: dict(zip(names, sizes, strict=True)) for tenant, sizes in held.items()}
        typer.echo(as_json({"tenants": told, "problems": late}))
    else:
        table = make_table(f"tenants, {len(nodes)} nodes", "tenant", "memory", "tiers")
        for tenant, sizes in sorted(held.items(), key=lambda one: -sum(one[1])):
            table.add_row(tenant or "(nobody)", *map(size, sizes))
        make_console().print(table)
    for node, problem in late.items():
        complain(f"node {node} is left out: {problem}")


@asks
def delete(
    asking: Asking,
    tenant: Annotated[str, typer.Option("--tenant", help="Whose pages; its name, or that of its cache.")],
) -> None:
    """Erase a tenant's pages of all models in memory and tiers of all nodes, and wait for the end of it."""
    if not is_tenant_name(tenant):
        raise ConfigError(f"--tenant: no tenant can be called {tenant!r}")
    with asking.node() as node:
        pages = node.ask(lambda i: DropNamespace(i, MARK + tenant), Done, DELETE_S).count
        away = [member.node for member in node.status().members if member.status == DEAD]
    if asking.json:
        typer.echo(as_json({"tenant": tenant, "pages": pages, "away": away}))
    else:
        make_console().print(f"erased {pages:,} pages of {tenant}")
    for name in away:
        complain(f"node {name} is away: it erases them when it returns")
    if away:
        raise typer.Exit(1)


def _status(asking: Asking, node: NodeAddress) -> StatusReport:
    with asking.node(node.address) as client:
        return client.status()
