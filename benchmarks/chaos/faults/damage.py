"""Faults of memory and disks: bits that flip, memory that is gone, disks without space."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.chaos import pages as p
from benchmarks.chaos.faults.direct import Direct, ask, pages_on
from benchmarks.chaos.faults.outcome import LeftOut
from benchmarks.chaos.faults.timing import POLL_S, disturbance, start_again
from benchmarks.chaos.field import Field
from benchmarks.chaos.moving import GEOMETRY, NAMESPACE
from benchmarks.chaos.plan import Fault
from benchmarks.chaos.records import Filled, Flipped
from benchmarks.dice import Dice
from benchmarks.node_processes import NodeProcess
from pdserve.errors import PoolError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import TierStatus
from pdserve.kvpool.tiers.ssd.segment_format import BLOCK_BYTES, Record, read_index

logger = logging.getLogger(__name__)

FIND_WITHIN_S: Final = 5.0
FLIPPED_ON_SSD: Final = 6
BACK_WITHIN_S: Final = 10.0
FILL_BATCH: Final = 16
FILL_PAGES: Final = 1024  # several segments of every node
WRITABLE_WITHIN_S: Final = 30.0


def flip(field: Field, fault: Fault) -> None:
    """Find a page in the node's memory by asking for it, flip one of its bits, and read it."""
    dice, node = Dice("flip", fault.draw), field.nodes[fault.node]
    deadline = time.monotonic() + FIND_WITHIN_S
    with Direct(node) as own:
        while time.monotonic() < deadline:
            for page in _damaged_of(field, node, dice):
                pins = own.get([p.key_of(field.seed, page)], p.segments_of(page))
                if pins[0].status == m.HIT:
                    size = sum(p.segments_of(page))
                    _flip_bit(node.arena_path, pins[0].offset + dice.below(size), dice.below(8))
                    own.release(pins)
                    _read_flipped(field, node, page)
                    return
            time.sleep(POLL_S)  # early in a run there may be none
    raise LeftOut(f"{node.name} has no page that may be damaged")


def _damaged_of(field: Field, node: NodeProcess, dice: Dice) -> Iterator[int]:
    """Pages that may be damaged and that the node owned at the start, in any order."""
    everywhere = range(p.number(p.DAMAGED, 0, 0), p.number(p.DAMAGED, 0, p.LARGE_EVERY * 32))
    return (page for page in dice.shuffled(everywhere) if field.owner(page) == node.name)


def _flip_bit(file: Path, offset: int, bit: int) -> None:
    content = np.memmap(file, dtype=np.uint8, mode="r+")
    content[offset] ^= 1 << bit
    content.flush()
    del content


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


def reboot(field: Field, fault: Fault) -> None:
    """The node's process and memory go; on its SSD some bits flip. What it has afterwards came from there."""
    dice, node = Dice("reboot", fault.draw), field.nodes[fault.node]
    tier = field.disks[fault.node].path / "tier"
    wanted = {p.key_of(field.seed, page): page for page in _damaged_of(field, node, dice)}
    deadline = time.monotonic() + FIND_WITHIN_S
    while not _on_disk(tier, wanted) and time.monotonic() < deadline:
        time.sleep(POLL_S)  # early in a run there may be none
    had = pages_on(node)
    with disturbance(field, "reboot", node.name):
        field.killed(node)
        node.kill()
        node.forget_memory()
        flipped = _flip_on_disk(tier, wanted, dice)
        field.stop.wait(fault.for_s)
        spoilt = {p.key_of(field.seed, page) for page in flipped}
        start_again(field, node, {key: size for key, size in had.items() if key not in spoilt})
        _read_from_ssd(field, node, flipped)


def _flip_on_disk(tier: Path, wanted: dict[bytes, int], dice: Dice) -> list[int]:
    """Flip a bit in every copy of a few of these pages, by key; which."""
    found = _on_disk(tier, wanted)
    chosen = [key for key in wanted if key in found][:FLIPPED_ON_SSD]
    for key in chosen:
        for file, record in found[key]:
            at = (record.block + 1) * BLOCK_BYTES + dice.below(record.page.length_bytes)
            _flip_bit(file, at, dice.below(8))
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
            became = Flipped(time.monotonic(), node.name, page, "replaced" if same else "delivered", "ssd")
            field.note(became)


def fill_disk(field: Field, fault: Fault) -> None:
    """No space where the node's tier lies: writes and reads go on in memory; afterwards the tier goes on."""
    node, disk = field.nodes[fault.node], field.disks[fault.node]
    name, dice = f"filled-{fault.draw:08x}", Dice("fill", fault.draw)
    client = PoolClient(field.direct(), name, GEOMETRY, name="chaos-fill")
    before = _tier(node).counters["store_failed"]
    start_s = time.monotonic()
    disk.fill(node.pid)
    try:
        keys = _write_until_refused(field, client, dice, node, before, start_s + fault.for_s)
    finally:
        disk.free(node.pid)
        end_s = time.monotonic()
    try:
        found = [(np.empty(sum(p.SHAPES[0]), np.uint8),) for _ in keys]
        missed = 0
        for key, got, (read,) in zip(keys, client.get(keys, found), found, strict=True):
            missed += not (got and np.array_equal(read, p.content(key, len(read))))
        again_s = _until_writable(field, client, dice, node, end_s)
        refused = _tier(node).counters["store_failed"] - before
        field.note(Filled(start_s, end_s, node.name, refused, again_s, len(keys), missed))
        ask(node, lambda request_id: m.DropNamespace(request_id, name), m.Done)
    finally:
        client.close()


def _write_until_refused(
    field: Field, client: PoolClient, dice: Dice, node: NodeProcess, before: int, until_s: float
) -> list[bytes]:
    """Write pages until the tier has refused some, and on until that time; their keys, of those that a node
    took.
    """
    keys: list[bytes] = []
    while len(keys) < FILL_PAGES and (time.monotonic() < until_s or not field.stop.is_set()):
        if time.monotonic() > until_s and _tier(node).counters["store_failed"] > before:
            break
        keys += _write(client, dice)
        time.sleep(POLL_S)
    return keys


def _write(client: PoolClient, dice: Dice) -> list[bytes]:
    keys = [p.any_key(dice) for _ in range(FILL_BATCH)]
    stored = client.put(keys, [(p.content(key, sum(p.SHAPES[0])),) for key in keys])
    return [key for key, ok in zip(keys, stored, strict=True) if ok]


def _until_writable(
    field: Field, client: PoolClient, dice: Dice, node: NodeProcess, since_s: float
) -> float | None:
    """How long until the tier took pages again; None: it did not."""
    stored = _tier(node).counters["stored"]
    while time.monotonic() < since_s + WRITABLE_WITHIN_S:
        _write(client, dice)
        with suppress(PoolError):
            tier = _tier(node)
            if tier.writable and tier.counters["stored"] > stored:
                return time.monotonic() - since_s
        time.sleep(POLL_S * 10)
    return None


def _tier(node: NodeProcess) -> TierStatus:
    return node.status().tiers[0]
