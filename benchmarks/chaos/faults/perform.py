"""Doing to the pool what the plan says, and writing down what came of it.

Each function performs one fault, from its beginning to its repair, in a thread of its own, and raises LeftOut
where it can do nothing, or not all of it. Faults of memory and disks are in damage.py, those of
page movers in movers.py, those that tenants make in tenants.py.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Set
from contextlib import suppress
from typing import Final

from benchmarks.chaos.faults.abandon import LEFT_OUT, READY
from benchmarks.chaos.faults.bucket import bucket
from benchmarks.chaos.faults.damage import fill_disk, flip, reboot
from benchmarks.chaos.faults.direct import PREFLIGHT_S, ask, pages_on
from benchmarks.chaos.faults.movers import lose_mover
from benchmarks.chaos.faults.outcome import LeftOut, recorded
from benchmarks.chaos.faults.tenants import drop, intrude, pressure, quota
from benchmarks.chaos.faults.timing import GONE_TIMEOUT_S, disturbance, start_again, status_of, until_all
from benchmarks.chaos.field import Field
from benchmarks.chaos.pages import DAMAGED, key_of, number
from benchmarks.chaos.plan import Fault, Kind
from benchmarks.chaos.records import Abandoned, Ended, Lost, Moved, Noticed, Stopped, Upgraded
from benchmarks.dice import Dice
from benchmarks.node_processes import NodeProcess, await_settled
from benchmarks.stores import BenchError
from pdserve.errors import PoolError, PoolTimeout, PoolUnavailable
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import ACTIVE, LEFT, Drain, Upgrade

logger = logging.getLogger(__name__)

FREE_WITHIN_S: Final = 30.0  # R14
ABANDONED_PAGES: Final = 48  # with 16, a node of three owned none once in 700 times
PAUSE_LEASES: Final = 1.2
POLL_S: Final = 0.05


def perform(field: Field, fault: Fault) -> None:
    """Do it, repair it, and note what became of it."""
    with recorded(field, fault):
        ACTS[fault.kind](field, fault)


def kill(field: Field, fault: Fault) -> None:
    node = field.nodes[fault.node]
    had = pages_on(node)
    with disturbance(field, "kill", node.name):
        field.killed(node)
        node.kill()
        field.stop.wait(fault.for_s)
        start_again(field, node, had)


def lose(field: Field, fault: Fault) -> None:
    node = field.nodes[fault.node]
    others = [other for other in field.nodes if other is not node]
    had = pages_on(node)
    with disturbance(field, "kill", node.name):
        at_s = time.monotonic()
        field.killed(node)
        node.kill()
        after_s = until_all(others, lambda report: status_of(report, node.name) != ACTIVE)
        field.note(Noticed(at_s, node.name, after_s))
        field.stop.wait(fault.for_s)
        start_again(field, node, had)


def upgrade(field: Field, fault: Fault) -> None:
    """One node after the other, each when the pool is whole again; as an operator's, it ends at an error."""
    for index in range(len(field.nodes)):
        if field.stop.is_set():
            raise LeftOut(f"the run ended when {index} of {len(field.nodes)} nodes were upgraded")
        upgraded = _upgraded(field, field.nodes[(fault.node + index) % len(field.nodes)])
        field.note(upgraded)
        if upgraded.error:
            raise BenchError(upgraded.error)


def _upgraded(field: Field, node: NodeProcess) -> Upgraded:
    """Upgrade one node; how that went."""
    damaged = {key_of(field.seed, number(DAMAGED, 0, which)) for which in range(field.shared)}
    had: Set[bytes] = set()
    lost: Set[bytes] = set()
    start_s, end_s, error = time.monotonic(), 0.0, ""
    try:
        had = pages_on(node).keys()
        before, pid = node.status(), node.pid
        start_s = time.monotonic()
        ask(node, Upgrade, m.Done, PREFLIGHT_S)
        error = _until_upgraded(node, before.incarnation)
        field.settle()
        end_s = time.monotonic()
        if not error and node.pid != pid:
            error = f"{node.name} is another process"
        lost = _nowhere(field, node, had - damaged)
    except (PoolError, BenchError) as failed:
        error = error or str(failed)
    return Upgraded(start_s, end_s or time.monotonic(), node.name, len(had), len(lost), error)


def _nowhere(field: Field, node: NodeProcess, had: Set[bytes]) -> Set[bytes]:
    """Pages that `node` had and that are lost. One that it does not list any more need not be: a listing may
    miss a page that rises from a tier or sinks meanwhile, and a replica that has ended is at its owner.
    """
    lost = had - pages_on(node).keys()
    for other in field.nodes if lost else ():
        lost -= pages_on(other).keys()
    for key in lost:
        logger.warning("page %s was on %s before its upgrade and is nowhere now", key.hex(), node.name)
    return lost


def _until_upgraded(node: NodeProcess, incarnation: int) -> str:
    """Wait until it serves again; nothing, or what went wrong."""
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while time.monotonic() < deadline:
        with suppress(PoolError):  # it is away for a moment
            report = node.status()
            if report.incarnation != incarnation:
                return ""
        time.sleep(POLL_S)
    return f"{node.name} did not come back within {GONE_TIMEOUT_S:.0f} s"


def visit(field: Field, fault: Fault) -> None:
    """A fourth node, known to clients only by what the others tell."""
    had = _pages_anywhere(field)
    node = field.visitor(f"visitor-{fault.draw:08x}")
    in_order = False
    try:
        _join(field, node, had)
        field.stop.wait(fault.for_s)
        start_s = time.monotonic()
        ask(node, Drain, m.Done)
        gone_s = until_all(field.nodes, lambda report: status_of(report, node.name) == LEFT)
        in_order = gone_s < GONE_TIMEOUT_S
        field.settle()
        field.note(Moved(start_s, time.monotonic(), node.name, len(field.nodes)))
        if not in_order or not node.stop():
            field.note(Ended(node.name, False, f"it did not leave within {gone_s:.0f} s, or not cleanly"))
    finally:
        if node.died:
            field.note(Ended(node.name, False, node.died))
        node.close()
        if not in_order:  # we took it away before it had given its pages to the others
            field.note(Lost(time.monotonic()))


def _join(field: Field, node: NodeProcess, had: Set[bytes]) -> None:
    """Start it, and note which of these pages came to it. Raises BenchError, PoolError: it did not join."""
    start_s, count = time.monotonic(), len(field.nodes)
    try:
        node.start()
        await_settled([*field.nodes, node])
        moved = had & pages_on(node).keys()
    except (BenchError, PoolError) as error:
        field.note(Moved(start_s, time.monotonic(), node.name, count, error=str(error)))
        raise
    try:
        left = had & _pages_anywhere(field)
    except LeftOut:  # it joined, and its visit goes on: only its pages are not counted
        moved, left = set(), set()
    field.note(Moved(start_s, time.monotonic(), node.name, count, len(moved), len(moved | left)))


def _pages_anywhere(field: Field) -> set[bytes]:
    """Raises LeftOut: another fault has one of the nodes, and nobody can tell what moves; PoolError."""
    try:
        return set().union(*map(pages_on, field.nodes))
    except (PoolUnavailable, PoolTimeout) as error:
        raise LeftOut(str(error)) from error


def pause(field: Field, fault: Fault) -> None:
    node = field.nodes[fault.node]
    with disturbance(field, "pause", node.name):
        node.pause()
        field.stop.wait(fault.for_s)
        node.resume()


def cut_off(field: Field, fault: Fault) -> None:
    """The node's relay closes its connections ("hang_up"), or lets nothing through ("silence")."""
    relay = field.ways[fault.node]
    with disturbance(field, fault.kind, field.nodes[fault.node].name):
        relay.set_mode("hang_up" if fault.kind == "hang_up" else "silence")
        field.stop.wait(fault.for_s)
        relay.set_mode("open")


def pause_client(field: Field, fault: Fault) -> None:
    """Until what it reads may be evicted and what it writes may be another's: it must notice."""
    worker = field.workers[fault.draw % len(field.workers)]
    start_s = time.monotonic()
    with worker.paused():
        field.stop.wait(field.settings.lease_s * PAUSE_LEASES)
    field.note(Stopped(start_s, time.monotonic(), worker.name))


def kill_client(field: Field, fault: Fault) -> None:
    worker = field.workers[fault.draw % len(field.workers)]
    start_s = time.monotonic()
    worker.replace()
    field.note(Stopped(start_s, time.monotonic(), worker.name, killed=True))


def abandon(field: Field, fault: Fault) -> None:
    abandon_on(field, fault.node, Dice(fault.draw).choice(("shm", "ucx")))


def abandon_on(field: Field, index: int, data_path: str) -> None:
    """Let a client of the node reserve pages, kill it, and watch what becomes of them. Raises LeftOut: it
    could reserve none; BenchError: it failed; PoolError.
    """
    node = field.nodes[index]
    arguments = [field.ways[index].address, data_path, str(ABANDONED_PAGES)]
    command = [sys.executable, "-m", "benchmarks.chaos.faults.abandon", *arguments]
    pipe = subprocess.PIPE
    client = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        assert client.stdout is not None
        said = client.stdout.readline().rstrip("\n")
        held_bytes = node.status().reserved_bytes if said == READY else 0
    finally:
        client.kill()
        _, errors = client.communicate()
    if said.startswith(LEFT_OUT):
        raise LeftOut(said.removeprefix(LEFT_OUT))
    if said != READY:
        last = errors.strip().splitlines()[-1:] or ["it said nothing"]
        raise BenchError(f"a client to be abandoned failed: {last[0]}")
    field.note(until_free(node, held_bytes))


def until_free(node: NodeProcess, held_bytes: int) -> Abandoned:
    """Watch the node's reserved bytes until they are 0, or for 30 s. Others reserve meanwhile, for
    moments.
    """
    began = time.monotonic()
    least = held_bytes
    while time.monotonic() < began + FREE_WITHIN_S:
        try:
            least = min(least, node.status().reserved_bytes)
        except PoolError:
            logger.debug("%s does not answer", node.name)  # another fault's doing
        if least == 0:
            break
        time.sleep(POLL_S)
    return Abandoned(began, held_bytes, least, time.monotonic() - began)


ACTS: Final[dict[Kind, Callable[[Field, Fault], None]]] = {
    "kill": kill,
    "lose": lose,
    "reboot": reboot,
    "upgrade": upgrade,
    "fill_disk": fill_disk,
    "visit": visit,
    "pause": pause,
    "hang_up": cut_off,
    "silence": cut_off,
    "flip": flip,
    "pause_client": pause_client,
    "kill_client": kill_client,
    "kill_mover": lose_mover,
    "pause_mover": lose_mover,
    "abandon": abandon,
    "quota": quota,
    "intrude": intrude,
    "drop": drop,
    "pressure": pressure,
    "bucket": bucket,
}
