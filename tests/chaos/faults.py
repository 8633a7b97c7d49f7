"""Doing to the pool what the plan says, and writing down what came of it.

Each function performs one fault, from its beginning to its repair, in a thread of its own, and raises LeftOut
where it can do nothing here and now, or not all of it; what it began is repaired then.
"""

from __future__ import annotations

import logging
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

import numpy as np

from pdserve.errors import PoolError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import LEFT, Drain, Upgrade
from pdserve.kvpool.tiers.ssd.segment_format import BLOCK_BYTES, Record, read_index
from tests.chaos import abandon
from tests.chaos.direct import AWAY, Direct, ask, pages_anywhere, pages_on
from tests.chaos.field import LEASE_S, SHARED, Field
from tests.chaos.plan import DISTURBING, Fault, Kind
from tests.chaos.records import (
    Abandoned,
    Acted,
    Became,
    Disturbed,
    Ended,
    Flipped,
    Lost,
    Moved,
    Restarted,
    Stopped,
    Upgraded,
)
from tests.chaos.worker import GEOMETRY, NAMESPACE
from tests.support.kvpool import made_pages as p
from tests.support.kvpool.node_processes import NodeProcess, await_settled
from tests.support.processes import HarnessError

logger = logging.getLogger(__name__)

POLL_S: Final = 0.05
FIND_WITHIN_S: Final = 5.0
HIT_TIMEOUT_S: Final = 10.0
BACK_WITHIN_S: Final = 10.0
FREE_WITHIN_S: Final = 30.0  # R14
GONE_TIMEOUT_S: Final = 30.0
PREFLIGHT_S: Final = 65.0  # a node gives its new version 60
PAUSE_LEASES: Final = 1.2
ASKED_PAGES: Final = 16
FLIPPED_ON_SSD: Final = 6
ABANDONED_PAGES: Final = 48  # with 16, a node of three owned none once in 700 times
WRITE_BATCH: Final = 32


class LeftOut(HarnessError):
    """The fault cannot be done here and now, or not to its end."""


@contextmanager
def recorded(field: Field, fault: Fault) -> Iterator[None]:
    """Note what becomes of the fault inside. Errors of the pool, the harness and the system end here."""
    at_s = time.monotonic()
    became: Became = "failed"
    why = "it was broken off"
    try:
        yield
        became, why = "done", ""
    except LeftOut as error:
        became, why = "left out", str(error)
    except (PoolError, HarnessError, OSError) as error:
        # a fault that disturbs has its node to itself (a visit, which asks all, is left out where one is
        # away); the others may find theirs away through one
        away = isinstance(error, AWAY) and fault.kind not in DISTURBING
        became, why = "left out" if away else "failed", str(error)
    finally:
        field.note(Acted(at_s, fault.kind, f"node{fault.node}", became, why))


def perform(field: Field, fault: Fault) -> None:
    """Do it, repair it, and note what became of it."""
    with recorded(field, fault):
        ACTS[fault.kind](field, fault)


@contextmanager
def disturbance(field: Field, kind: str, node: str) -> Iterator[None]:
    """Until the pool has settled again, a node cannot be expected to answer."""
    start_s = time.monotonic()
    try:
        yield
        field.settle()
    finally:
        field.note(Disturbed(start_s, time.monotonic(), kind, node))


# --- nodes that are killed, rebooted, upgraded


def kill(field: Field, fault: Fault) -> None:
    node = field.nodes[fault.node]
    had = pages_on(node)
    with disturbance(field, "kill", node.name):
        field.killed(node)
        node.kill()
        field.stop.wait(fault.for_s)
        start_again(field, node, had)


def start_again(field: Field, node: NodeProcess, had: dict[bytes, int]) -> None:
    """Start a node that had these pages (key: length in bytes), wait for it to give one, and note when it
    did. Raises HarnessError, PoolError.
    """
    began_s = time.monotonic()
    node.spawn()
    after_s = node.await_ready() - began_s
    asked = [key for key, length in had.items() if length == sum(p.SHAPES[0])][:ASKED_PAGES]
    hit_s = _first_hit(node, asked, began_s)
    field.note(Restarted(time.monotonic(), node.name, after_s, node.status().pages, hit_s, len(asked)))


def _first_hit(node: NodeProcess, asked: list[bytes], began_s: float) -> float | None:
    while asked and time.monotonic() < began_s + HIT_TIMEOUT_S:
        with suppress(PoolError), Direct(node) as own:
            pins = own.get(asked, p.SHAPES[0])
            own.release(pins)
            if any(pin.status == m.HIT for pin in pins):
                return time.monotonic() - began_s
        time.sleep(POLL_S)
    return None


def reboot(field: Field, fault: Fault) -> None:
    """The node's process and memory go; on its SSD some bits flip. What it has afterwards came from there."""
    draw, node = random.Random(fault.draw), field.nodes[fault.node]
    tier = field.tier_of(node)
    wanted = {p.key_of(field.seed, page): page for page in _damaged_of(field, node, draw)}
    deadline = time.monotonic() + FIND_WITHIN_S
    while not _on_disk(tier, wanted) and time.monotonic() < deadline:
        time.sleep(POLL_S)  # early in a run there may be none
    had = pages_on(node)
    with disturbance(field, "reboot", node.name):
        field.killed(node)
        node.kill()
        node.forget_memory()
        flipped = _flip_on_disk(tier, wanted, draw)
        field.stop.wait(fault.for_s)
        spoilt = {p.key_of(field.seed, page) for page in flipped}
        start_again(field, node, {key: size for key, size in had.items() if key not in spoilt})
        _read_from_ssd(field, node, flipped)


def _flip_on_disk(tier: Path, wanted: dict[bytes, int], draw: random.Random) -> list[int]:
    """Flip a bit in every copy of a few of these pages, by key; which."""
    found = _on_disk(tier, wanted)
    chosen = [key for key in wanted if key in found][:FLIPPED_ON_SSD]
    for key in chosen:
        for file, record in found[key]:
            at = (record.block + 1) * BLOCK_BYTES + draw.randrange(record.page.length_bytes)
            _flip_bit(file, at, draw.randrange(8))
    return [wanted[key] for key in chosen]


def _on_disk(tier: Path, wanted: Collection[bytes]) -> dict[bytes, list[tuple[Path, Record]]]:
    """Where in the tier's files these pages are."""
    found: dict[bytes, list[tuple[Path, Record]]] = {}
    for file in sorted(tier.glob("*.seg")):
        try:
            content = file.read_bytes()
        except OSError:
            continue  # dropped by the node meanwhile
        index = read_index(lambda at, size, of=content: of[at : at + size], len(content))  # type: ignore[misc]
        for record in index.records if index else ():
            if record.page.key in wanted:
                found.setdefault(record.page.key, []).append((file, record))
    return found


def _read_from_ssd(field: Field, node: NodeProcess, flipped: list[int]) -> None:
    """Once the node has found what is there: `start_again` had a page of it."""
    deadline = time.monotonic() + BACK_WITHIN_S
    while not node.status().tiers[0].pages and time.monotonic() < deadline:
        time.sleep(POLL_S)
    with Direct(node) as own:
        for page in flipped:
            key, size = p.key_of(field.seed, page), sum(p.segments_of(page))
            pins = own.get([key], p.segments_of(page))
            if pins[0].status != m.HIT:
                field.note(Flipped(time.monotonic(), node.name, page, "detected", "ssd"))
                continue
            same = np.array_equal(own.bytes_of(pins[0], size), p.content(key, size))
            own.release(pins)
            # the same: written anew meanwhile
            field.note(Flipped(time.monotonic(), node.name, page, "replaced" if same else "delivered", "ssd"))


def upgrade(field: Field, fault: Fault) -> None:
    """One node after the other, each when the pool is whole again; as an operator's, it ends at an error."""
    for index in range(len(field.nodes)):
        if field.stop.is_set():
            raise LeftOut(f"the run ended when {index} of {len(field.nodes)} nodes were upgraded")
        upgraded = _upgraded(field, field.nodes[(fault.node + index) % len(field.nodes)])
        field.note(upgraded)
        if upgraded.error:
            raise HarnessError(upgraded.error)


def _upgraded(field: Field, node: NodeProcess) -> Upgraded:
    """Upgrade one node; how that went."""
    damaged = {p.key_of(field.seed, p.number(p.DAMAGED, 0, which)) for which in range(SHARED)}
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
    except (PoolError, HarnessError) as failed:
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
            if node.status().incarnation != incarnation:
                return ""
        time.sleep(POLL_S)
    return f"{node.name} did not come back within {GONE_TIMEOUT_S:.0f} s"


# --- a node that joins and leaves; pages that must make room


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
        gone_s = _until_left(field.nodes, node.name)
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
    """Start it, and note which of these pages came to it. Raises HarnessError, PoolError: it did not join."""
    start_s, count = time.monotonic(), len(field.nodes)
    try:
        node.start()
        await_settled([*field.nodes, node])
        moved = had & pages_on(node).keys()
    except (HarnessError, PoolError) as error:
        field.note(Moved(start_s, time.monotonic(), node.name, count, error=str(error)))
        raise
    try:
        left = had & _pages_anywhere(field)
    except LeftOut:  # it joined, and its visit goes on: only its pages are not counted
        moved, left = set(), set()
    field.note(Moved(start_s, time.monotonic(), node.name, count, len(moved), len(moved | left)))


def _pages_anywhere(field: Field) -> set[bytes]:
    try:
        return pages_anywhere(field.nodes)
    except AWAY as error:
        raise LeftOut(str(error)) from error


def _until_left(nodes: Sequence[NodeProcess], name: str) -> float:
    """Wait until every node's own report says so, not for ever; how long that took, in s."""
    began_s = time.monotonic()
    waiting = list(nodes)
    while waiting and time.monotonic() < began_s + GONE_TIMEOUT_S:
        with suppress(PoolError):  # another fault's doing
            if any(member.node == name and member.status == LEFT for member in waiting[0].status().members):
                waiting.pop(0)
                continue
        time.sleep(POLL_S)
    return time.monotonic() - began_s


def pressure(field: Field, fault: Fault) -> None:
    """Write into another namespace until everything that can be evicted was; then make room again."""
    draw = random.Random(fault.draw)
    with closing(PoolClient(field.direct(), "pressure", GEOMETRY, name="chaos-pressure")) as client:
        with disturbance(field, "pressure", ""):
            until_s = time.monotonic() + fault.for_s
            while time.monotonic() < until_s and not field.stop.is_set():
                keys = [p.any_key(draw) for _ in range(WRITE_BATCH)]
                client.put(keys, [(p.content(key, sum(p.SHAPES[0])),) for key in keys])
            if not client.clear():
                raise HarnessError("no page was written into the other namespace")
        field.note(Lost(time.monotonic()))


# --- nodes that do not answer


def pause(field: Field, fault: Fault) -> None:
    node = field.nodes[fault.node]
    with disturbance(field, "pause", node.name):
        node.pause()
        field.stop.wait(fault.for_s)
        node.resume()


def cut_off(field: Field, fault: Fault) -> None:
    """The node's relay closes its connections ("hang_up"), or lets nothing through ("silence")."""
    relay = field.relays[fault.node]
    with disturbance(field, fault.kind, field.nodes[fault.node].name):
        relay.set_mode("hang_up" if fault.kind == "hang_up" else "silence")
        field.stop.wait(fault.for_s)
        relay.set_mode("open")


# --- damage


def flip(field: Field, fault: Fault) -> None:
    """Find a page in the node's memory by asking for it, flip one of its bits, and read it."""
    draw, node = random.Random(fault.draw), field.nodes[fault.node]
    deadline = time.monotonic() + FIND_WITHIN_S
    with Direct(node) as own:
        while time.monotonic() < deadline:
            for page in _damaged_of(field, node, draw):
                pins = own.get([p.key_of(field.seed, page)], p.segments_of(page))
                if pins[0].status == m.HIT:
                    at = pins[0].offset + draw.randrange(sum(p.segments_of(page)))
                    _flip_bit(node.arena_path, at, draw.randrange(8))
                    own.release(pins)
                    _read_flipped(field, node, page)
                    return
            time.sleep(POLL_S)  # early in a run there may be none
    raise LeftOut(f"{node.name} has no page that may be damaged")


def _damaged_of(field: Field, node: NodeProcess, draw: random.Random) -> Iterator[int]:
    """Pages that may be damaged and that the node owned at the start, in any order."""
    everywhere = [p.number(p.DAMAGED, 0, which) for which in range(p.LARGE_EVERY * 32)]
    return (page for page in draw.sample(everywhere, len(everywhere)) if field.owner(page) == node.name)


def _flip_bit(file: Path, offset: int, bit: int) -> None:
    content = np.memmap(file, dtype=np.uint8, mode="r+")
    content[offset] ^= 1 << bit
    content.flush()


def _read_flipped(field: Field, node: NodeProcess, page: int) -> None:
    at_s = time.monotonic()
    key, size = p.key_of(field.seed, page), sum(p.segments_of(page))
    found = np.zeros(size, np.uint8)
    with closing(PoolClient(field.direct(), NAMESPACE, GEOMETRY, name="chaos-flip")) as client:
        (ok,) = client.get([key], [p.segments(found, page)])
        if ok and not np.array_equal(found, p.content(key, size)):
            field.note(Flipped(at_s, node.name, page, "delivered"))
        elif client.counters.pages_corrupt:
            field.note(Flipped(at_s, node.name, page, "detected"))
        else:  # another reader was faster, and perhaps it was written anew
            field.note(Flipped(at_s, node.name, page, "replaced"))


# --- clients


def pause_client(field: Field, fault: Fault) -> None:
    """Until what it reads may be evicted and what it writes may be another's: it must notice."""
    worker = field.workers[fault.draw % len(field.workers)]
    start_s = time.monotonic()
    with worker.paused():
        field.stop.wait(LEASE_S * PAUSE_LEASES)
    field.note(Stopped(start_s, time.monotonic(), worker.name))


def kill_client(field: Field, fault: Fault) -> None:
    worker = field.workers[fault.draw % len(field.workers)]
    start_s = time.monotonic()
    worker.replace()
    field.note(Stopped(start_s, time.monotonic(), worker.name, killed=True))


def abandon_one(field: Field, fault: Fault) -> None:
    abandon_on(field, fault.node, ("shm", "ucx")[fault.draw % 2])


def abandon_on(field: Field, index: int, data_path: str) -> None:
    """Let a client of the node reserve pages, kill it, and watch what becomes of them. Raises LeftOut: it
    could reserve none; HarnessError: it failed; PoolError.
    """
    node = field.nodes[index]
    arguments = [field.relays[index].address, data_path, str(ABANDONED_PAGES)]
    pipe = subprocess.PIPE
    client = subprocess.Popen(
        [sys.executable, "-m", abandon.__name__, *arguments], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    try:
        assert client.stdout is not None
        said = client.stdout.readline().rstrip("\n")
        held_bytes = node.status().reserved_bytes if said == abandon.READY else 0
    finally:
        client.kill()
        _, errors = client.communicate()
    if said.startswith(abandon.LEFT_OUT):
        raise LeftOut(said.removeprefix(abandon.LEFT_OUT))
    if said != abandon.READY:
        last = errors.strip().splitlines()[-1:] or ["it said nothing"]
        raise HarnessError(f"a client to be abandoned failed: {last[0]}")
    field.note(until_free(node, held_bytes))


def until_free(node: NodeProcess, held_bytes: int) -> Abandoned:
    """Watch the node's reserved bytes until they are 0, or for 30 s. Others reserve for moments."""
    began_s = time.monotonic()
    least = held_bytes
    while time.monotonic() < began_s + FREE_WITHIN_S:
        with suppress(PoolError):  # another fault's doing
            least = min(least, node.status().reserved_bytes)
        if least == 0:
            break
        time.sleep(POLL_S)
    return Abandoned(began_s, held_bytes, least, time.monotonic() - began_s)


ACTS: Final[dict[Kind, Callable[[Field, Fault], None]]] = {
    "kill": kill,
    "reboot": reboot,
    "upgrade": upgrade,
    "visit": visit,
    "pause": pause,
    "hang_up": cut_off,
    "silence": cut_off,
    "pressure": pressure,
    "flip": flip,
    "pause_client": pause_client,
    "kill_client": kill_client,
    "abandon": abandon_one,
}


def in_thread(field: Field, fault: Fault) -> threading.Thread:
    """It, performed in a thread that has started."""
    thread = threading.Thread(target=perform, args=(field, fault), name=f"fault-{fault.kind}")
    thread.start()
    return thread
