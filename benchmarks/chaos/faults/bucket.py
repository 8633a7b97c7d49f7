"""The bucket below all nodes misbehaves while a node has nothing else: its memory and its disk are gone."""

from __future__ import annotations

import logging
import shutil
import time
from typing import Final, get_args

import numpy as np

from benchmarks.chaos import pages as p
from benchmarks.chaos.faults.direct import Direct, pages_on
from benchmarks.chaos.faults.outcome import LeftOut
from benchmarks.chaos.faults.timing import POLL_S, disturbance
from benchmarks.chaos.field import Field
from benchmarks.chaos.plan import Fault
from benchmarks.chaos.records import FromBucket, Lost
from benchmarks.dice import Dice
from benchmarks.node_processes import NodeProcess
from benchmarks.object_server import Mode
from pdserve.errors import PoolError
from pdserve.kvpool.protocol import messages as m

logger = logging.getLogger(__name__)

MODES: Final = tuple(mode for mode in get_args(Mode) if mode != "well")
BACK_WITHIN_S: Final = 15.0
ASKED_AT_A_TIME: Final = 16
ASKED: Final = 256


def bucket(field: Field, fault: Fault) -> None:
    """Clients go on meanwhile. Afterwards pages that the node had must come back from the bucket."""
    if field.bucket is None:
        raise LeftOut("these nodes have no bucket")
    node, mode = field.nodes[fault.node], Dice("bucket", fault.draw).choice(MODES)
    had = [key for key, size in pages_on(node).items() if size == sum(p.SHAPES[0])][:ASKED]
    with disturbance(field, "bucket", node.name):
        field.bucket.mode = mode
        try:
            field.killed(node)
            node.kill()
            node.forget_memory()
            for lost in (field.disks[fault.node].path / "tier", field.output.parent / "spools" / node.name):
                shutil.rmtree(lost, ignore_errors=True)
            node.spawn()
            node.await_ready()
            wrong = _read(node, had).wrong
            field.stop.wait(fault.for_s)
        finally:
            field.bucket.behave()
        field.note(Lost(time.monotonic()))
        found = _read_until_back(node, had)
    field.note(FromBucket(time.monotonic(), node.name, mode, len(had), found.right, wrong + found.wrong))


class _Found:
    """How many pages had their bytes, and how many others."""

    def __init__(self) -> None:
        self.right = self.wrong = 0


def _read_until_back(node: NodeProcess, keys: list[bytes]) -> _Found:
    deadline_s = time.monotonic() + BACK_WITHIN_S
    found = _Found()
    while keys and not found.right and time.monotonic() < deadline_s:
        wrong, found = found.wrong, _read(node, keys)
        found.wrong += wrong
        time.sleep(POLL_S)
    return found


def _read(node: NodeProcess, keys: list[bytes]) -> _Found:
    found, size = _Found(), sum(p.SHAPES[0])
    try:
        with Direct(node) as own:
            for first in range(0, len(keys), ASKED_AT_A_TIME):
                some = keys[first : first + ASKED_AT_A_TIME]
                pins = own.get(some, p.SHAPES[0])
                for key, pin in zip(some, pins, strict=True):
                    if pin.status == m.HIT:
                        same = np.array_equal(own.bytes_of(pin, size), p.content(key, size))
                        found.right += same
                        found.wrong += not same
                own.release(pins)
    except PoolError:
        logger.debug("%s does not answer", node.name)
    return found
