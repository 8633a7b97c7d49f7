"""Doing to the pool what the plan says, and writing down what came of it.

Each function performs one fault, from its beginning to its repair, in a thread of its own. A fault that finds
its node gone through another fault does nothing.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import numpy as np

from pdserve.bench.chaos import pages as p
from pdserve.bench.chaos.dice import Dice
from pdserve.bench.chaos.field import Field
from pdserve.bench.chaos.plan import Fault, Kind
from pdserve.bench.chaos.records import (
    Abandoned,
    Disturbed,
    Dropped,
    Ended,
    Flipped,
    Lost,
    Moved,
    Noticed,
    Overshot,
    Restarted,
    Stopped,
)
from pdserve.bench.chaos.worker import GEOMETRY, NAMESPACE
from pdserve.bench.cluster import NodeProcess, await_settled
from pdserve.bench.stores import BenchError
from pdserve.errors import PoolError
from pdserve.kvpool import messages as m
from pdserve.kvpool.client import PoolClient
from pdserve.kvpool.cluster_messages import ACTIVE, LEFT, Drain, NamespaceSettings, PutNamespace
from pdserve.kvpool.commands.asking import NodeClient
from pdserve.kvpool.hosts import host_id
from pdserve.kvpool.transports.base import Bytes1D
from pdserve.kvpool.transports.control import ControlChannel, make_hello
from pdserve.kvpool.wire import KEY_BYTES

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S: Final = 2.0
FREE_WITHIN_S: Final = 30.0  # R14
GONE_WITHIN_S: Final = 1.0  # R5
READ_AFTER_DROP_S: Final = 2.5
DROPPED_PAGES: Final = 48
ABANDONED_PAGES: Final = 16
PRESSURE_BATCH: Final = 32
PAUSE_LEASES: Final = 1.2
POLL_S: Final = 0.05
NOTICE_POLL_S: Final = 0.02
GONE_TIMEOUT_S: Final = 30.0
QUOTA_BYTES: Final = 2 << 20
QUOTA_S: Final = 2.0


def perform(field: Field, fault: Fault) -> None:
    """Do it, and repair it."""
    try:
        ACTS[fault.kind](field, fault)
    except (PoolError, BenchError) as error:
        logger.info("fault %s of node%d: %s", fault.kind, fault.node, error)


@contextmanager
def _disturbance(field: Field, kind: str, node: str) -> Iterator[None]:
    start_s = time.monotonic()
    try:
        yield
        field.settle()
    finally:
        field.note(Disturbed(start_s, time.monotonic(), kind, node))


def kill(field: Field, fault: Fault) -> None:
    node = field.nodes[fault.node]
    with _disturbance(field, "kill", node.name):
        _kill(field, node)
        field.stop.wait(fault.for_s)
        after_s = node.start()
        field.note(Restarted(time.monotonic(), node.name, after_s, node.status().pages))


def _kill(field: Field, node: NodeProcess) -> None:
    if node.died:  # before we came
        field.note(Ended(node.name, False, node.died))
    node.kill()


def lose(field: Field, fault: Fault) -> None:
    node = field.nodes[fault.node]
    others = [other for other in field.nodes if other is not node]
    with _disturbance(field, "kill", node.name):
        at_s = time.monotonic()
        _kill(field, node)
        after_s = _until_all(others, lambda report: _status_of(report, node.name) != ACTIVE)
        field.note(Noticed(at_s, node.name, after_s))
        field.stop.wait(fault.for_s)
        again_s = node.start()
        field.note(Restarted(time.monotonic(), node.name, again_s, node.status().pages))


def visit(field: Field, fault: Fault) -> None:
    """A fourth node, known to clients only by what the others tell."""
    node = field.visitor(f"visitor-{fault.draw:08x}")
    count = len(field.nodes)
    try:
        start_s = time.monotonic()
        node.start()
        await_settled([*field.nodes, node])
        moved, left = node.status().pages, sum(other.status().pages for other in field.nodes)
        field.note(Moved(start_s, time.monotonic(), node.name, count, moved, moved + left))
        field.stop.wait(fault.for_s)
        start_s = time.monotonic()
        _ask(node, Drain)
        gone_s = _until_all(field.nodes, lambda report: _status_of(report, node.name) == LEFT)
        field.settle()
        field.note(Moved(start_s, time.monotonic(), node.name, count))
        if gone_s >= GONE_TIMEOUT_S or not node.stop():
            field.note(Ended(node.name, False, f"it did not leave within {gone_s:.0f} s, or not cleanly"))
    finally:
        if node.died:
            field.note(Ended(node.name, False, node.died))
        node.close()


def _until_all(nodes: Sequence[NodeProcess], holds: Callable[[m.StatusReport], bool]) -> float:
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
        time.sleep(NOTICE_POLL_S)
    return time.monotonic() - began


def _status_of(report: m.StatusReport, name: str) -> int | None:
    return next((member.status for member in report.members if member.node == name), None)


def pause(field: Field, fault: Fault) -> None:
    node = field.nodes[fault.node]
    with _disturbance(field, "pause", node.name):
        node.pause()
        field.stop.wait(fault.for_s)
        node.resume()


def hang_up(field: Field, fault: Fault) -> None:
    with _disturbance(field, "hang_up", field.nodes[fault.node].name):
        field.ways[fault.node].set_mode("hang_up")
        field.stop.wait(fault.for_s)
        field.ways[fault.node].set_mode("open")


def silence(field: Field, fault: Fault) -> None:
    with _disturbance(field, "silence", field.nodes[fault.node].name):
        field.ways[fault.node].set_mode("silence")
        field.stop.wait(fault.for_s)
        field.ways[fault.node].set_mode("open")


def flip(field: Field, fault: Fault) -> None:
    """Find a page in the node's memory by asking for it, flip one of its bits, and read it."""
    dice, node = Dice("flip", fault.draw), field.nodes[fault.node]
    everywhere = range(p.number(p.DAMAGED, 0, 0), p.number(p.DAMAGED, 0, p.LARGE_EVERY * 32))
    candidates = [page for page in dice.shuffled(everywhere) if field.owner(page) == node.name]
    deadline = time.monotonic() + ASK_TIMEOUT_S
    channel = ControlChannel.connect(node.address, make_hello("chaos-flip", host_id(), "shm"), deadline)
    try:
        opened = channel.call(m.OpenNamespace(1, NAMESPACE, GEOMETRY), deadline)
        if not isinstance(opened, m.Opened):
            return
        for request_id, page in enumerate(candidates, start=2):
            asked = [p.key_of(field.seed, page)]
            got = channel.call(
                m.Get(request_id, opened.namespace, asked, list(p.segments_of(page))), deadline
            )
            if isinstance(got, m.Got) and got.pins[0].status == m.HIT:
                pin = got.pins[0]
                _flip_bit(node, pin.offset + dice.below(sum(p.segments_of(page))), dice.below(8))
                channel.post(m.Release([pin.slot], [pin.sequence]))
                _read_flipped(field, node, page)
                return
    finally:
        channel.close()


def _flip_bit(node: NodeProcess, offset: int, bit: int) -> None:
    memory = np.memmap(node.arena_path, dtype=np.uint8, mode="r+")
    memory[offset] ^= 1 << bit
    del memory


def _read_flipped(field: Field, node: NodeProcess, page: int) -> None:
    at_s = time.monotonic()
    key, size = p.key_of(field.seed, page), sum(p.segments_of(page))
    found = np.zeros(size, np.uint8)
    client = PoolClient(field.direct(), NAMESPACE, GEOMETRY, name="chaos-flip")
    try:
        (ok,) = client.get([key], [p.segments(found, page)])
        if ok and not np.array_equal(found, p.content(key, size)):
            field.note(Flipped(at_s, node.name, page, "delivered"))
        elif client.counters.pages_corrupt:
            field.note(Flipped(at_s, node.name, page, "detected"))
        else:  # another reader was faster, and perhaps it was written anew
            field.note(Flipped(at_s, node.name, page, "replaced"))
    finally:
        client.close()


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
    field.note(Stopped(start_s, time.monotonic(), worker.name))


def abandon(field: Field, fault: Fault) -> None:
    abandon_on(field, fault.node, Dice(fault.draw).choice(("shm", "ucx")))


def abandon_on(field: Field, index: int, data_path: str) -> None:
    """Let a client of the node reserve pages, kill it, and watch what becomes of them."""
    node = field.nodes[index]
    arguments = [field.ways[index].address, data_path, str(ABANDONED_PAGES)]
    command = [sys.executable, "-m", "pdserve.bench.chaos.abandon", *arguments]
    pipe, none = subprocess.PIPE, subprocess.DEVNULL
    client = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=none)
    try:
        assert client.stdout is not None
        if client.stdout.readline() != b"ready\n":
            return  # the node was away
        held_bytes = node.status().reserved_bytes
    finally:
        client.kill()
        client.communicate()
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


def drop(field: Field, fault: Fault) -> None:
    """Fill a namespace, drop it, and go on reading with the client that filled it."""
    name = f"dropped-{fault.draw:08x}"
    dice = Dice(name)
    keys = [dice.below(2**62).to_bytes(KEY_BYTES, "little") for _ in range(DROPPED_PAGES)]
    whole = [p.content(key, sum(p.SHAPES[0])) for key in keys]
    client = PoolClient(field.direct(), name, GEOMETRY, name="chaos-drop")
    try:
        if not all(client.put(keys, [(page,) for page in whole])):
            return
        _ask(field.nodes[fault.node], lambda request_id: m.DropNamespace(request_id, name))
        at_s = time.monotonic()
        reads = hits = 0
        found: list[tuple[Bytes1D]] = [(np.empty_like(page),) for page in whole]
        while time.monotonic() < at_s + READ_AFTER_DROP_S:
            late = time.monotonic() > at_s + GONE_WITHIN_S
            got = client.get(keys, found)
            if late:
                reads += len(keys)
                hits += sum(got)
            time.sleep(POLL_S)
        field.note(Dropped(at_s, reads, hits))
    finally:
        client.close()


def quota(field: Field, fault: Fault) -> None:
    """Two writers, far beyond what fits; the nodes are asked again and again what the namespace has."""
    name = f"quota-{fault.draw:08x}"
    settings = NamespaceSettings(quota_bytes=QUOTA_BYTES)
    for node in field.nodes:  # each by itself: news take a moment to go around
        _ask(node, lambda request_id: PutNamespace(request_id, name, settings))
    at_s, enough = time.monotonic(), threading.Event()
    writers = [
        threading.Thread(target=_write_on, args=(field, name, f"{fault.draw}/{index}", enough))
        for index in range(2)
    ]
    for writer in writers:
        writer.start()
    over_bytes = samples = 0
    try:
        while time.monotonic() < at_s + QUOTA_S:
            for node in field.nodes:
                with suppress(PoolError):  # another fault's doing
                    for namespace in node.status().namespaces:
                        if namespace.name == name:
                            over_bytes = max(over_bytes, namespace.slot_bytes - QUOTA_BYTES)
                            samples += namespace.slot_bytes > 0
            time.sleep(NOTICE_POLL_S)
    finally:
        enough.set()
        for writer in writers:
            writer.join()
    field.note(Overshot(at_s, over_bytes, samples))
    _ask(field.nodes[fault.node], lambda request_id: m.DropNamespace(request_id, name))


def _write_on(field: Field, name: str, seed: str, enough: threading.Event) -> None:
    dice = Dice("writer", seed)
    client = PoolClient(field.direct(), name, GEOMETRY, name="chaos-writer")
    try:
        while not enough.is_set():
            keys = [dice.below(2**62).to_bytes(KEY_BYTES, "big") for _ in range(PRESSURE_BATCH)]
            client.put(keys, [(p.content(key, sum(p.SHAPES[0])),) for key in keys])
    finally:
        client.close()


def _ask(node: NodeProcess, make: Callable[[int], m.Request]) -> None:
    """Raises PoolError."""
    asked = NodeClient(node.address, timeout_s=ASK_TIMEOUT_S)
    try:
        asked.ask(make, m.Done)
    finally:
        asked.close()


def pressure(field: Field, fault: Fault) -> None:
    """Write into another namespace until everything that can be evicted was; then make room again."""
    client = PoolClient(field.direct(), "pressure", GEOMETRY, name="chaos-pressure")
    enough = threading.Event()
    writer = threading.Thread(target=_write_on, args=(field, "pressure", str(fault.draw), enough))
    try:
        with _disturbance(field, "pressure", ""):
            writer.start()
            field.stop.wait(fault.for_s)
            enough.set()
            writer.join()
            client.clear()
        field.note(Lost(time.monotonic()))
    finally:
        enough.set()
        client.close()


ACTS: Final[dict[Kind, Callable[[Field, Fault], None]]] = {
    "kill": kill,
    "lose": lose,
    "visit": visit,
    "pause": pause,
    "hang_up": hang_up,
    "silence": silence,
    "flip": flip,
    "pause_client": pause_client,
    "kill_client": kill_client,
    "abandon": abandon,
    "quota": quota,
    "drop": drop,
    "pressure": pressure,
}
