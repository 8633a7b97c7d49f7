"""`pdserve pool drain`: let a node hand its pages over and leave."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Final

import typer

from pdserve.errors import PoolError, PoolRefused, PoolTimeout, PoolUnavailable
from pdserve.kvpool.admin.node_client import Asking, NodeClient, asks
from pdserve.kvpool.admin.tables import as_json, make_console
from pdserve.kvpool.protocol.cluster_messages import ACTIVE, LEFT, Drain, Member
from pdserve.kvpool.protocol.messages import Done, StatusReport

POLL_S: Final = 0.5


@asks
def drain(
    asking: Asking,
    deadline_s: Annotated[
        float,
        typer.Option("--deadline", metavar="SECONDS", min=0.1, help="Longest wait until the node has left."),
    ] = 600.0,
) -> None:
    """Let the other nodes take over what this one holds, and wait until it has left the ring."""
    console = make_console()
    show: Callable[[str], None] = (lambda _: None) if asking.json else console.print
    started_s = time.monotonic()
    with asking.node() as node:
        name = node.status().node
        node.ask(Drain, Done)
        others = follow(node, asking, started_s + deadline_s, show)
    seconds = time.monotonic() - started_s
    if asking.json:
        typer.echo(as_json({"node": name, "left": True, "seconds": round(seconds, 3), "others": others}))
    else:
        console.print(f"{name} has left after {seconds:.1f} s; it may be stopped")


def follow(node: NodeClient, asking: Asking, deadline_s: float, show: Callable[[str], None]) -> list[str]:
    """Wait until the node has left; the names of the nodes in the ring now. `show` gets a line for each
    step. Raises PoolTimeout, PoolRefused when it is an owner again, and PoolUnavailable when it went without
    anybody knowing that it had left.
    """
    report = node.status()
    said = ""
    while True:
        line = progress(report)
        if line != said:
            show(line)
            said = line
        if (own := _member(report, report.node)) is not None and own.status == LEFT:
            return [member.node for member in report.members if member.status == ACTIVE]
        if own is not None and own.status == ACTIVE:
            raise PoolRefused(
                f"{report.node} does not leave any more: there was no other node to take its pages, or it "
                "was started anew; drain it again once the others are there"
            )
        if time.monotonic() >= deadline_s:
            raise PoolTimeout(f"{report.node} has not left yet, and goes on leaving: {line}")
        time.sleep(POLL_S)
        try:
            report = node.status()
        except (PoolUnavailable, PoolTimeout) as error:
            return _ask_others(report, asking, error)


def progress(report: StatusReport) -> str:
    """How far the leaving of the node is that reports."""
    others = [m for m in report.members if m.status == ACTIVE and m.node != report.node]
    settled = sum(member.settled >= report.epoch for member in others)
    return f"{report.node}: {report.pages:,} pages; {settled} of {len(others)} nodes have all that is theirs"


def _ask_others(report: StatusReport, asking: Asking, gone: PoolError) -> list[str]:
    """The node does not answer any more: had it left?"""
    for member in report.members:
        if member.status != ACTIVE or member.node == report.node:
            continue
        try:
            with asking.node(member.address) as other:
                view = other.status()
        except PoolError:
            continue
        own = _member(view, report.node)
        if own is not None and own.status == LEFT:
            return [each.node for each in view.members if each.status == ACTIVE]
        raise PoolRefused(f"{report.node} went away before it had left: {gone}; {member.node} lists it still")
    raise PoolUnavailable(f"{report.node} went away, and no other node answers: {gone}")


def _member(report: StatusReport, name: str) -> Member | None:
    return next((member for member in report.members if member.node == name), None)
