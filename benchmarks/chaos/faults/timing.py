"""How long faults last, and what is waited for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from benchmarks.chaos.faults.direct import Direct
from benchmarks.chaos.field import Field
from benchmarks.chaos.pages import SHAPES
from benchmarks.chaos.records import Disturbed, Restarted
from benchmarks.node_processes import NodeProcess
from pdserve.errors import PoolError
from pdserve.kvpool.protocol.messages import HIT, StatusReport

logger = logging.getLogger(__name__)

POLL_S: Final = 0.02
GONE_TIMEOUT_S: Final = 30.0
HIT_TIMEOUT_S: Final = 10.0
ASKED_PAGES: Final = 16


@contextmanager
def disturbance(field: Field, kind: str, node: str) -> Iterator[None]:
    """Until the pool has settled again, a node cannot be expected to answer."""
    start_s = time.monotonic()
    try:
        yield
        field.settle()
    finally:
        field.note(Disturbed(start_s, time.monotonic(), kind, node))


def until_all(nodes: Sequence[NodeProcess], holds: Callable[[StatusReport], bool]) -> float:
    """Wait until it holds for every node's own report, not for ever; how long that took, in s."""
    began = time.monotonic()
    waiting = list(nodes)
    while waiting and time.monotonic() < began + GONE_TIMEOUT_S:
        try:
            if holds(waiting[0].status()):
                waiting.pop(0)
                continue
        except PoolError:
            logger.debug("%s does not answer", waiting[0].name)  # another fault's doing
        time.sleep(POLL_S)
    return time.monotonic() - began


def status_of(report: StatusReport, name: str) -> int | None:
    """Of a member, as this node knows it."""
    return next((member.status for member in report.members if member.node == name), None)


def start_again(field: Field, node: NodeProcess, had: dict[bytes, int]) -> None:
    """Start a node that had these pages (key: length in bytes), wait for it to give one, and note when it
    did. Raises BenchError, PoolError.
    """
    began = time.monotonic()
    node.spawn()
    after_s = node.await_ready() - began
    asked = [key for key, length in had.items() if length == sum(SHAPES[0])][:ASKED_PAGES]
    hit_s = _first_hit(node, asked, began)
    field.note(Restarted(time.monotonic(), node.name, after_s, node.status().pages, hit_s, len(asked)))


def _first_hit(node: NodeProcess, asked: list[bytes], began_s: float) -> float | None:
    while asked and time.monotonic() < began_s + HIT_TIMEOUT_S:
        try:
            with Direct(node) as own:
                pins = own.get(asked, SHAPES[0])
                own.release(pins)
            if any(pin.status == HIT for pin in pins):
                return time.monotonic() - began_s
        except PoolError:
            logger.debug("%s does not answer", node.name)
        time.sleep(POLL_S)
    return None
