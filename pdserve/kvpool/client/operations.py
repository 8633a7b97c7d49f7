"""A chunk of a batch: ask, read and write pages over one connection, and count the outcomes.

Used by one thread per connection. client.py and connection_pool.py choose the node and decide about retries.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from pdserve.errors import PoolRefused
from pdserve.kvpool.client.connection_pool import OpenConnection
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.frames import expected
from pdserve.kvpool.protocol.messages import ADMIN, WRITE
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers
from pdserve.kvpool.protocol.page_tag import TAG_BYTES, PageTags
from pdserve.kvpool.transports.base import CORRUPT, OK

logger = logging.getLogger(__name__)
R = TypeVar("R", bound=m.Reply)

CLEAR_TIMEOUT_S: Final = 6.0
"""A node answers a Clear when it is durable, after 4 s at most (core/durable_answers.py)."""

# result of one page of a put
UNSTORED: Final = 0
STORED: Final = 1  # in the pool, or being written by another writer
FULL: Final = 2  # not stored: the node had no room at that moment


@dataclass
class ClientCounters:
    """Totals of a client. `failures`: operations on nodes that ended with an error or at a deadline."""

    pages_read: int = 0
    pages_missed: int = 0
    pages_written: int = 0
    pages_present: int = 0  # unnecessary writes: the page was there, or another client was writing it
    pages_refused: int = 0  # writes for which the pool had no room
    pages_lost: int = 0  # reads whose lease ended during the copy
    pages_corrupt: int = 0  # reads whose checksum did not match
    pages_forged: int = 0  # reads whose checksum matched, but not the tag made with the page key
    pages_ssd: int = 0  # reads that the node loaded from a tier (SSD, object store)
    bytes_read: int = 0
    bytes_written: int = 0
    failures: int = 0


class Tally:
    """Counts for several threads."""

    def __init__(self) -> None:
        self.counters = ClientCounters()
        self._lock = threading.Lock()

    def add(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                setattr(self.counters, name, getattr(self.counters, name) + amount)


def expect(opened: OpenConnection, request: m.Request, kind: type[R], deadline_s: float) -> R:
    """Call, and return a reply of `kind`.

    Raises PoolRefused for a Fault, and the errors of `Connection.call`.
    """
    return expected(opened.call(request, deadline_s), kind, opened.node)


def exists(opened: OpenConnection, keys: list[bytes], deadline_s: float) -> list[bool]:
    """For each key: whether it is committed, on any node. Raises PoolError."""
    request = m.Exists(opened.next_id(), opened.namespace, keys)
    return _mask(opened, expect(opened, request, m.Present, deadline_s), keys)


def read(
    opened: OpenConnection,
    keys: list[bytes],
    pages: list[PageBuffers],
    deadline_s: float,
    tally: Tally,
    tags: PageTags | None = None,
) -> list[bool]:
    """Read pages into their buffers. True for those that are there and right.

    `tags`: pages in the pool end with a tag. Raises PoolError. Nothing writes into the buffers after the
    return or an error.
    """
    trailers = _trailers(tags, keys)
    pages = [[*page, trailer] for page, trailer in zip(pages, trailers, strict=True)] if tags else pages
    segment_bytes = [segment.nbytes for segment in pages[0]]
    request = m.Get(opened.next_id(), opened.namespace, keys, segment_bytes)
    got = expect(opened, request, m.Got, deadline_s)
    pins = got.pins
    _check_length(opened, pins, keys)
    held = [i for i, pin in enumerate(pins) if pin.status == m.HIT]
    result = [False] * len(keys)
    if held:
        outcomes = opened.connection.read_pages([pins[i] for i in held], [pages[i] for i in held], deadline_s)
        for i, outcome in zip(held, outcomes, strict=True):
            result[i] = outcome == OK
        corrupt = [i for i, outcome in zip(held, outcomes, strict=True) if outcome == CORRUPT]
        forged = _forged(tags, keys, pages, result)
        lost = sum(outcome not in (OK, CORRUPT) for outcome in outcomes)
        below = sum(0 <= i < len(result) and result[i] for i in got.below)
        tally.add(pages_corrupt=len(corrupt), pages_forged=len(forged), pages_lost=lost, pages_ssd=below)
        for wrong, what in ((corrupt, "checksum"), (forged, "tag: someone without the page key wrote them")):
            if wrong:
                text = "pool node %s: %d of %d pages did not match their %s; they are recomputed"
                logger.error(text, opened.node, len(wrong), len(held), what)
        corrupt += forged
        with opened.best_effort():
            opened.connection.post(m.Release([pins[i].slot for i in held], [pins[i].sequence for i in held]))
            if corrupt and opened.rights & WRITE:  # else a client with the right will find the damage
                bad, sequences = [keys[i] for i in corrupt], [pins[i].sequence for i in corrupt]
                discard = m.Discard(opened.next_id(), opened.namespace, bad, sequences)
                expect(opened, discard, m.Done, deadline_s)
    return result


def raise_pages(opened: OpenConnection, keys: list[bytes], deadline_s: float) -> list[bool]:
    """Have the node load those that only a tier has into memory, as far as it has room; at most MAX_KEPT_KEYS
    of them. Does not wait for it. Raises PoolError.
    """
    request = m.Exists(opened.next_id(), opened.namespace, keys, move=m.UP)
    return _mask(opened, expect(opened, request, m.Present, deadline_s), keys)


def write(
    opened: OpenConnection,
    keys: list[bytes],
    pages: list[PageBuffers],
    deadline_s: float,
    tally: Tally,
    tags: PageTags | None = None,
) -> list[int]:
    """Write pages. Returns UNSTORED, STORED or FULL for each; the caller counts FULL. Raises PoolError."""
    if not opened.rights & WRITE:
        tally.add(pages_refused=len(keys))
        return [UNSTORED] * len(keys)
    segment_bytes = [segment.nbytes for segment in pages[0]] + [TAG_BYTES] * (tags is not None)
    request = m.Reserve(opened.next_id(), opened.namespace, keys, segment_bytes)
    grants = expect(opened, request, m.Reserved, deadline_s).grants
    _check_length(opened, grants, keys)
    result = [UNSTORED] * len(keys)
    for i, grant in enumerate(grants):
        if grant.status in (m.PRESENT, m.BUSY):
            result[i] = STORED
        elif grant.status == m.FULL:
            result[i] = FULL
    present = result.count(STORED)
    refused = sum(grant.status == m.TOO_LARGE for grant in grants)
    written = 0
    mine = [i for i, grant in enumerate(grants) if grant.status == m.GRANTED]
    if mine:
        granted = [grants[i] for i in mine]
        written_pages = [pages[i] for i in mine]
        if tags is not None:
            written_pages = [[*pages[i], _tag(tags, keys[i], pages[i])] for i in mine]
        checksums = opened.connection.write_pages(granted, written_pages, deadline_s)
        slots, sequences = [grant.slot for grant in granted], [grant.sequence for grant in granted]
        commit = m.Commit(opened.next_id(), slots, sequences, checksums)
        done = _mask(opened, expect(opened, commit, m.Committed, deadline_s), mine)
        for i, committed in zip(mine, done, strict=True):
            result[i] = STORED if committed else UNSTORED
        written = sum(done)
    # counted at the end, because all of this may be repeated
    tally.add(
        pages_present=present,
        pages_refused=refused,
        pages_written=written,
        bytes_written=written * sum(segment_bytes),
    )
    return result


def _trailers(tags: PageTags | None, keys: list[bytes]) -> list[Bytes1D]:
    """Room for the tags of pages, where they have any."""
    return list(np.zeros((len(keys), TAG_BYTES), np.uint8)) if tags else []


def _tag(tags: PageTags, key: bytes, page: PageBuffers) -> Bytes1D:
    return np.frombuffer(tags.tag(key, page), np.uint8)


def _forged(
    tags: PageTags | None, keys: list[bytes], pages: list[PageBuffers], result: list[bool]
) -> list[int]:
    """The pages that were read and have a wrong tag; they are no result any more."""
    if tags is None:
        return []
    forged = [
        i for i, read in enumerate(result) if read and not tags.fits(keys[i], pages[i][:-1], pages[i][-1])
    ]
    for i in forged:
        result[i] = False
    return forged


def ping(opened: OpenConnection, deadline_s: float) -> None:
    """Check that the node answers. Raises PoolError."""
    expect(opened, m.Ping(opened.next_id()), m.Done, deadline_s)


def status(opened: OpenConnection, deadline_s: float) -> m.StatusReport:
    """The node's status. Raises PoolError."""
    return expect(opened, m.Status(opened.next_id()), m.StatusReport, deadline_s)


def clear(opened: OpenConnection, deadline_s: float) -> int:
    """Drop the namespace's pages on all nodes. Returns their number. Raises PoolError."""
    if not opened.rights & ADMIN:
        logger.warning("pool node %s: our token may not clear the namespace", opened.node)
        return 0
    try:
        return expect(opened, m.Clear(opened.next_id(), opened.namespace), m.Done, deadline_s).count
    except PoolRefused as error:
        logger.warning("pool node %s: clearing the namespace: %s", opened.node, error)
        raise


def remove(opened: OpenConnection, keys: Sequence[bytes], deadline_s: float) -> int:
    """Drop these pages on all nodes. Returns how many there were. Raises PoolError."""
    count = 0
    for start in range(0, len(keys), m.MAX_PAGES):
        part = list(keys[start : start + m.MAX_PAGES])
        discard = m.Discard(opened.next_id(), opened.namespace, part, [])
        count += expect(opened, discard, m.Done, deadline_s).count
    return count


def remaining_s(deadline_s: float) -> float:
    """Time left, at least 0."""
    return max(0.0, deadline_s - time.monotonic())


def _check_length(opened: OpenConnection, answers: Sequence[object], asked: Sequence[object]) -> None:
    """Raises PoolRefused if the numbers of answers and requests differ."""
    if len(answers) != len(asked):
        raise PoolRefused(f"pool node {opened.node} answered {len(answers)} of {len(asked)} keys")


def _mask(opened: OpenConnection, reply: m.Present | m.Committed, asked: Sequence[object]) -> list[bool]:
    _check_length(opened, reply.mask, asked)
    return [byte == 1 for byte in reply.mask]
