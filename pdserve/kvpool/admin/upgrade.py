"""`pdserve pool upgrade`: let a node go on as the version that is installed now.

The command ends once another node may be upgraded: this one serves, and every node has all pages that it
owns. If the others took it for dead meanwhile, pages move for a moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Final

import typer

from pdserve.errors import PoolRestarting, PoolTimeout, PoolUnavailable
from pdserve.kvpool.admin.node_client import Asking, asks
from pdserve.kvpool.admin.tables import as_json, complain, make_console
from pdserve.kvpool.protocol.cluster_messages import ACTIVE, Upgrade
from pdserve.kvpool.protocol.messages import Done, StatusReport

LOAD_S: Final = 65.0  # a node gives its new version 60
POLL_S: Final = 0.05


@asks
def upgrade(
    asking: Asking,
    deadline_s: Annotated[
        float,
        typer.Option(
            "--deadline",
            metavar="SECONDS",
            min=0.1,
            help="Longest wait until the node is back and no pages move.",
        ),
    ] = 30.0,
) -> None:
    """Replace a running node by the version that is installed now, in the same process and on the same pages.

    The node tries the new version first; if that would not start, the node goes on as it is.
    """
    started_s = time.monotonic()
    with asking.node() as node:
        before = node.status()
        node.ask(Upgrade, Done, timeout_s=LOAD_S)
    deadline_at_s = time.monotonic() + deadline_s
    after = _until(asking, deadline_at_s, lambda report: report.incarnation != before.incarnation)
    if after is None:
        raise PoolTimeout(
            f"{before.node} did not come back in time: see its log, and start it again; its pages stay"
        )
    seconds = time.monotonic() - started_s
    if not has_settled(after) and _until(asking, deadline_at_s, has_settled) is None:
        complain(f"{after.node}: pages still move: wait with the next node")
    recovered = after.counters.get("recovered_pages", 0)
    if asking.json:
        typer.echo(as_json({"node": after.node, "pages": recovered, "seconds": round(seconds, 3)}))
    else:
        make_console().print(f"{after.node} was upgraded in {seconds:.1f} s, with {recovered:,} pages")


def has_settled(report: StatusReport) -> bool:
    """Whether every node has all pages that it owns, as far as this one knows."""
    return all(member.settled >= report.epoch for member in report.members if member.status == ACTIVE)


def _until(asking: Asking, deadline_s: float, holds: Callable[[StatusReport], bool]) -> StatusReport | None:
    """The first report of which that holds; None: there was none by the deadline."""
    while time.monotonic() < deadline_s:
        try:
            with asking.node() as node:
                report = node.status()
            if holds(report):
                return report
        except (PoolRestarting, PoolUnavailable, PoolTimeout):
            pass
        time.sleep(POLL_S)
    return None
