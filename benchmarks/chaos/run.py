"""A chaos run: nodes, workers and faults in time, then the judge."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
from rich.table import Table

from benchmarks.chaos.faults.outcome import LeftOut, recorded
from benchmarks.chaos.faults.perform import abandon_on, perform, until_free
from benchmarks.chaos.field import RESTART_WAIT_S, TIMEOUTS, Field, Settings, save, set_up
from benchmarks.chaos.judge.expectations import of
from benchmarks.chaos.judge.judge import Row, judge, starved_s
from benchmarks.chaos.plan import CALM_S, DISTURBING, Fault, Plan
from benchmarks.chaos.records import Acted, Ended, MoversReplaced, Record, read_lines
from benchmarks.chaos.starvation import watching
from benchmarks.node_processes import NodeProcess
from benchmarks.stores import BenchError
from benchmarks.tables import table
from pdserve.errors import ConfigError, PoolError

logger = logging.getLogger(__name__)

WORKER_STOP_S: Final = max(TIMEOUTS.values()) * 2 + RESTART_WAIT_S + 5.0  # two operations, and a moment
FAULT_STOP_S: Final = 120.0  # the longest waits three times for 30 s


class Replay(msgspec.Struct, frozen=True):
    """All that a run is made from, as kept in `plan.json`."""

    plan: Plan
    settings: Settings


class Outcome(msgspec.Struct, frozen=True):
    """What a run showed. `starved_s`: for so long some node got no processor, and nothing was judged. Of the
    `faults` that were planned, the quota at the end among them, `carried_out` were done from end to end.
    """

    replay: Replay
    rows: list[Row]
    starved_s: float
    faults: int
    carried_out: int

    @property
    def passed(self) -> bool:
        return all(row.verdict != "MISS" for row in self.rows)


def figures_table(outcome: Outcome) -> Table:
    """The figures for people."""
    plan = outcome.replay.plan
    done, planned = outcome.carried_out, outcome.faults
    faults = f"{done} faults" if done == planned else f"{done} of {planned} faults"
    title = f"Chaos: seed {plan.seed}, {plan.minutes:g} minutes, {plan.nodes} nodes, {faults}"
    starved = f"Not judged: {outcome.starved_s:.0f} s in which a node waited for a processor."
    columns = ("", "figure", "goal", "seen", " ")
    rows = ((row.number, row.what, row.goal, row.figure, row.verdict) for row in outcome.rows)
    return table(title, columns, rows, left=columns, caption=starved if outcome.starved_s else None)


def load_replay(path: Path) -> Replay:
    """Raises ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Replay)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--replay {path}: {error}") from error


def run(replay: Replay, directory: Path, say: Callable[[str], None]) -> Outcome:
    """Run it in `directory`, where logs and records stay. `say` hears about each fault. Raises BenchError."""
    plan, settings = replay.plan, replay.settings
    directory.mkdir(parents=True, exist_ok=True)
    save(directory / "plan.json", replay)
    with set_up(plan, settings, directory) as field:
        with watching(field):
            try:
                _faults_in_time(field, plan, say)
            finally:
                field.stop.set()
        _end(field)
        records = _records(field)
        rows, acted = judge(records, field.owner, RESTART_WAIT_S), of(records, Acted)
        done = sum(one.became == "done" for one in acted)
        outcome = Outcome(replay, rows, starved_s(records), len(acted), done)
    save(directory / "figures.json", outcome)
    return outcome


def _faults_in_time(field: Field, plan: Plan, say: Callable[[str], None]) -> None:
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
            say(f"   left out  {fault.kind} node{fault.node}: no time is left")
            with recorded(field, fault):
                raise LeftOut("no time was left")
            continue
        field.stop.wait(max(0.0, began + at_s - time.monotonic()))
        say(f"{at_s:7.1f} s  {_words(fault)}")
        threads.append(threading.Thread(target=perform, args=(field, fault), name=f"fault-{fault.kind}"))
        if fault.kind in DISTURBING:
            heavy.append((fault, threads[-1]))
        threads[-1].start()
    field.stop.wait(max(0.0, ends_s - time.monotonic()))
    field.stop.set()
    deadline = time.monotonic() + FAULT_STOP_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            raise BenchError(f"{thread.name} was not repaired within {FAULT_STOP_S:.0f} s")


def _words(fault: Fault) -> str:
    times = f" for {fault.for_s:.1f} s" if fault.for_s else ""
    return f"{fault.kind} node{fault.node}{times}"


def _end(field: Field) -> None:
    """A quota is overrun; the last worker is killed as it works, the others end by themselves; then nodes,
    after a count.
    """
    perform(field, Fault(0.0, "quota", 0, 0.0, 0))
    *others, last = field.workers
    last.kill()
    for worker in others:
        worker.ask_to_stop()
        if worker.by_mover:
            field.note(MoversReplaced(worker.name, worker.movers_replaced()))
    deadline = time.monotonic() + WORKER_STOP_S
    for worker in others:
        clean = worker.ended(deadline - time.monotonic())
        field.note(Ended(worker.name, clean, _complaint_in(worker.log())))
    for index, node in enumerate(field.nodes):
        if node.died:
            field.note(Ended(node.name, False, node.died))
            continue
        field.note(until_free(node, node.status().reserved_bytes))
        complaint = _not_abandoned(field, index) or _miscount(node, field.settings.lease_s)
        clean = node.stop()
        field.note(Ended(node.name, clean, complaint or node.died or _complaint_in(node.log())))


def _not_abandoned(field: Field, index: int) -> str:
    """Nothing else goes on: why no client could be abandoned on a node, or nothing."""
    try:
        abandon_on(field, index, ("shm", "ucx")[index % 2])
    except (BenchError, PoolError) as error:
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
