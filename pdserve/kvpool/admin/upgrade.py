"""`pdserve pool upgrade`: let a node go on as the version that is installed now."""

from __future__ import annotations

import time
from typing import Annotated, Final

import typer

from pdserve.errors import PoolRestarting, PoolTimeout, PoolUnavailable
from pdserve.kvpool.admin.node_client import Asking, asks
from pdserve.kvpool.admin.tables import as_json, make_console
from pdserve.kvpool.protocol.cluster_messages import Upgrade
from pdserve.kvpool.protocol.messages import Done, StatusReport

LOAD_S: Final = 65.0  # a node gives its new version 60
POLL_S: Final = 0.05


@asks
def upgrade(
    asking: Asking,
    deadline_s: Annotated[
        float,
        typer.Option("--deadline", metavar="SECONDS", min=0.1, help="Longest wait until the node is back."),
    ] = 30.0,
) -> None:
    """Replace a running node by the version that is installed now, in the same process and on the same pages.

    The node tries the new version first; if that would not start, the node goes on as it is.
    """
    started_s = time.monotonic()
    with asking.node() as node:
        before = node.status()
        node.ask(Upgrade, Done, timeout_s=LOAD_S)
    after = _until_back(before, asking, time.monotonic() + deadline_s)
    seconds = time.monotonic() - started_s
    recovered = after.counters.get("recovered_pages", 0)
    if asking.json:
        typer.echo(as_json({"node": after.node, "pages": recovered, "seconds": round(seconds, 3)}))
    else:
        make_console().print(f"{after.node} was upgraded in {seconds:.1f} s, with {recovered:,} pages")


def _until_back(before: StatusReport, asking: Asking, deadline_s: float) -> StatusReport:
    """Raises PoolTimeout."""
    while time.monotonic() < deadline_s:
        try:
            with asking.node() as node:
                report = node.status()
            if report.incarnation != before.incarnation:
                return report
        except (PoolRestarting, PoolUnavailable, PoolTimeout):
            pass
        time.sleep(POLL_S)
    raise PoolTimeout(
        f"{before.node} did not come back in time: see its log, and start it again; its pages stay"
    )
