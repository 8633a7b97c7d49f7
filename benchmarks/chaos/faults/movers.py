"""Faults of page movers: they are killed or hang, and their clients must go on with others."""

from __future__ import annotations

import signal
import time
from typing import Final

import psutil

from benchmarks.chaos.faults.outcome import LeftOut
from benchmarks.chaos.field import Field, WorkerProcess
from benchmarks.chaos.plan import Fault
from benchmarks.chaos.records import MoverLost, Stopped
from benchmarks.dice import Dice
from benchmarks.stores import BenchError

MODULE: Final = "pdserve.kvpool.mover"
POLL_S: Final = 0.02
ANOTHER_WITHIN_S: Final = 60.0
"""A call waits for its own time-out and for the upgrade of a node. Then its mover is ended."""


def lose_mover(field: Field, fault: Fault) -> None:
    """Kill or stop one, and wait until its client has another. Raises LeftOut, BenchError."""
    dice = Dice(fault.kind, fault.draw)
    worker = dice.choice([worker for worker in field.workers if worker.by_mover])
    with worker.kept() as free:
        if not free:
            raise LeftOut(f"another fault has {worker.name} just now")
        start_s, before = time.monotonic(), worker.movers_replaced()
        try:
            dice.choice(_movers_of(worker)).send_signal(
                signal.SIGSTOP if fault.kind == "pause_mover" else signal.SIGKILL
            )
        except psutil.NoSuchProcess as error:
            raise LeftOut(f"{worker.name} has no page mover just now") from error
        while worker.movers_replaced() == before:
            if time.monotonic() > start_s + ANOTHER_WITHIN_S:
                raise BenchError(f"{worker.name} has no other page mover after {ANOTHER_WITHIN_S:.0f} s")
            time.sleep(POLL_S)
        end_s = time.monotonic()
    field.note(Stopped(start_s, end_s, worker.name))
    field.note(MoverLost(start_s, end_s, worker.name))


def _movers_of(worker: WorkerProcess) -> list[psutil.Process]:
    """Raises NoSuchProcess: it has none."""
    children = psutil.Process(worker.pid).children()
    movers = [child for child in children if MODULE in child.cmdline()]
    if not movers:
        raise psutil.NoSuchProcess(worker.pid)
    return movers
