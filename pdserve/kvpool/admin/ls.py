"""`pdserve pool ls`: the pages of a namespace."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Final

import typer

from pdserve.errors import PoolError, PoolTimeout
from pdserve.kvpool.admin.node_client import Asking, NodeClient, asks, in_parallel
from pdserve.kvpool.admin.tables import as_json, complain, make_console, make_table, size
from pdserve.kvpool.protocol.cluster_messages import ListPages, PageEntry, PageList
from pdserve.kvpool.protocol.messages import NodeAddress

BATCH_PAGES: Final = 1024


@asks
def ls(
    asking: Asking,
    namespace: Annotated[str, typer.Argument(help="Name of the namespace; `pool status` lists them.")],
    limit: Annotated[int, typer.Option("--limit", min=1, help="Most pages shown of each node.")] = 50,
    everyone: Annotated[bool, typer.Option("--all", help="Show every node that this one knows.")] = False,
) -> None:
    """List pages of a namespace: key, length, where it lies, how many read it."""
    nodes = asking.all_nodes() if everyone else [NodeAddress("", asking.address)]

    def listed(node: NodeAddress) -> list[PageEntry]:
        with asking.node(node.address) as client:
            # one more than is shown, to know whether there are more
            return [page for page, _ in zip(pages(client, namespace), range(limit + 1), strict=False)]

    found = in_parallel(nodes, listed)
    errors = [each for each in found if isinstance(each, PoolError)]
    if len(errors) == len(nodes):
        raise errors[0]
    _show(namespace, nodes, found, limit, asking.json)
    for error in errors:
        complain(str(error))


def pages(node: NodeClient, namespace: str) -> Iterator[PageEntry]:
    """All pages of the namespace on the node, asked for as they are taken. Raises PoolError, also where the
    node names no page for longer than it has for one answer: such a listing may have no end.
    """
    cursor, until_s = 0, time.monotonic() + node.timeout_s
    while True:
        batch = node.ask(lambda i, at=cursor: ListPages(i, namespace, at, BATCH_PAGES), PageList)  # type: ignore[misc]
        yield from batch.pages
        cursor = batch.cursor
        if not cursor:
            return
        if batch.pages:
            until_s = time.monotonic() + node.timeout_s
        elif time.monotonic() >= until_s:
            raise PoolTimeout(f"pool node {node.address} goes on listing and names no page")


def _show(
    namespace: str,
    nodes: list[NodeAddress],
    found: list[list[PageEntry] | PoolError],
    limit: int,
    json: bool,
) -> None:
    by_node = [(node, each) for node, each in zip(nodes, found, strict=True) if isinstance(each, list)]
    if json:
        for node, entries in by_node:
            for page in entries[:limit]:
                row = {name: getattr(page, name) for name in page.__struct_fields__}
                typer.echo(as_json({"node": node.node, **row} if node.node else row))
        return
    several = any(node.node for node in nodes)
    left = 2 if several else 1
    headings = ["key", *(["node"] if several else []), "bytes", "place", "pins", "replica"]
    table = make_table(f"pages of {namespace}", *headings, left=left, most_rows=limit * len(nodes))
    for node, entries in by_node:
        for page in entries[:limit]:
            where = [node.node] if several else []
            cells = (
                size(page.length_bytes),
                page.place,
                f"{page.pins:,}",
                "yes" if page.replica else "-",
            )
            table.add_row(page.key.hex()[:32], *where, *cells)
    more = any(len(entries) > limit for _, entries in by_node)
    console = make_console()
    console.print(table if table.row_count else f"{namespace} has no pages here")
    if more:
        console.print(f"more than {limit} pages: --limit shows more")
