"""A chaos run: nodes, workers and faults in time, then the judge."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from pdserve.errors import PoolError
from tests.chaos.faults import LeftOut, abandon_on, in_thread, recorded, until_free
from tests.chaos.field import LEASE_S, RESTART_WAIT_S, TIMEOUTS, Field, set_up, watching
from tests.chaos.judge import Row, judge
from tests.chaos.plan import CALM_S, DISTURBING, Fault, Plan
from tests.chaos.records import Ended, Record, read_lines
from tests.support.kvpool.node_processes import NodeProcess
from tests.support.processes import HarnessError

logger = logging.getLogger(__name__)

WORKER_STOP_S: Final = max(TIMEOUTS.values()) * 2 + RESTART_WAIT_S + 5.0  # two operations, and a moment
FAULT_STOP_S: Final = 120.0  # the longest waits three times for 30 s


def run(plan: Plan, directory: Path) -> list[Row]:
    """Run it in `directory`, where the plan, logs, records and figures stay. Raises HarnessError."""
    _save(directory / "plan.json", plan)
    with set_up(plan, directory) as field:
        with watching(field):
            try:
                _faults_in_time(field, plan)
            finally:
                field.stop.set()
        _end(field)
        rows = judge(_records(field), field.owner, RESTART_WAIT_S)
    _save(directory / "figures.json", rows)
    return rows


def _save(path: Path, content: object) -> None:
    path.write_text(json.dumps(msgspec.to_builtins(content), indent=1) + "\n")


def _faults_in_time(field: Field, plan: Plan) -> None:
    """An episode begins at its time, or when what the one before disturbed has been well again for a while:
    then all that follows is later by as much, and the run ends with its minutes all the same.
    """
    began = time.monotonic()
    ends_s = began + plan.minutes * 60
    late_s = 0.0
    heavy: list[tuple[Fault, threading.Thread]] = []
    threads: list[threading.Thread] = []
    for fault in sorted(plan.faults, key=lambda fault: fault.at_s):
        if fault.kind in DISTURBING:
            before = [thread for earlier, thread in heavy if earlier.at_s < fault.at_s]
            if any(thread.is_alive() for thread in before):
                for thread in before:
                    thread.join(max(0.0, ends_s - time.monotonic()))
                late_s = max(late_s, time.monotonic() + CALM_S[0] - began - fault.at_s)
        at_s = fault.at_s + late_s
        if at_s + fault.for_s > plan.minutes * 60:
            with recorded(field, fault):
                raise LeftOut("no time was left")
            continue
        field.stop.wait(max(0.0, began + at_s - time.monotonic()))
        logger.info("%.1f s: %s node%d for %.1f s", at_s, fault.kind, fault.node, fault.for_s)
        threads.append(in_thread(field, fault))
        if fault.kind in DISTURBING:
            heavy.append((fault, threads[-1]))
    field.stop.wait(max(0.0, ends_s - time.monotonic()))
    field.stop.set()
    deadline = time.monotonic() + FAULT_STOP_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            raise HarnessError(f"{thread.name} was not repaired within {FAULT_STOP_S:.0f} s")


def _end(field: Field) -> None:
    """The last worker is killed as it works, the others end by themselves; then nodes, after a count."""
    *others, last = field.workers
    last.kill()
    for worker in others:
        worker.ask_to_stop()
    deadline = time.monotonic() + WORKER_STOP_S
    for worker in others:
        clean = worker.ended(deadline - time.monotonic())
        field.note(Ended(worker.name, clean, _complaint_in(worker.log())))
    for index, node in enumerate(field.nodes):
        if node.died:
            field.note(Ended(node.name, False, node.died))
            continue
        field.note(until_free(node, node.status().reserved_bytes))
        complaint = _not_abandoned(field, index) or _miscount(node, LEASE_S)
        clean = node.stop()
        field.note(Ended(node.name, clean, complaint or node.died or _complaint_in(node.log())))


def _not_abandoned(field: Field, index: int) -> str:
    """Nothing else goes on: why no client could be abandoned on a node, or nothing."""
    try:
        abandon_on(field, index, ("shm", "ucx")[index % 2])
    except (HarnessError, PoolError) as error:
        return str(error)
    return ""


def _miscount(node: NodeProcess, lease_s: float) -> str:
    """Once every lease is over: all bytes are somewhere, and none is pinned."""
    deadline = time.monotonic() + 2 * lease_s + 2
    while True:
        try:
            report = node.status()
        except PoolError as error:
            return str(error)
        parts = report.free_bytes, report.used_bytes, report.reserved_bytes, report.quarantined_bytes
        if sum(parts) != report.capacity_bytes:
            return f"{parts} do not add up to {report.capacity_bytes} bytes"
        held = report.pins or report.reserved_bytes or report.quarantined_bytes
        if not held or time.monotonic() > deadline:
            return f"{held} pins or bytes are held by nobody" if held else ""
        time.sleep(0.1)


def _complaint_in(log: str) -> str:
    lines = log.splitlines()
    return next((f"{line} ... {lines[-1]}" for line in lines if line.startswith("Traceback")), "")


def _records(field: Field) -> list[Record]:
    records: list[Record] = []
    for path in (field.output, *(worker.output for worker in field.workers)):
        if path.exists():
            records += read_lines(path.read_bytes())
    return records


def run_quietly(plan: Plan, directory: Path, sample: Callable[[Field], None], every_s: float = 5.0) -> None:
    """The plan's minutes of load without faults; `sample` looks at the field now and then. Raises
    HarnessError.
    """
    with set_up(plan, directory) as field:
        ends_s = time.monotonic() + plan.minutes * 60
        while time.monotonic() < ends_s:
            time.sleep(every_s)
            sample(field)
