"""A chunk of a batch: ask, read and write pages over one connection, and count the outcomes.

Used by one thread per connection. client.py and connection_pool.py choose the node and decide about retries.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from pdserve.errors import PoolRefused
from pdserve.kvpool.client.connection_pool import OpenConnection
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.frames import expected
from pdserve.kvpool.protocol.messages import ADMIN, WRITE
from pdserve.kvpool.protocol.page_bytes import PageBuffers
from pdserve.kvpool.protocol.page_tag import TAG_BYTES, PageTags
from pdserve.kvpool.transports.base import CORRUPT, LOST, OK, PageOutcome

logger = logging.getLogger(__name__)
R = TypeVar("R", bound=m.Reply)

CLEAR_TIMEOUT_S: Final = 6.0
"""A node answers a Clear when it is durable, after 4 s at most (core/durable_answers.py)."""

UNPINNED_BYTES: Final = 4 * 1024 * 1024
"""Of pages that are copied from mapped memory without pins: that takes a millisecond, in which nothing is
evicted that was just read. Where the node did evict one, the slot table says so.
"""
FORGED: Final[PageOutcome] = 3  # the checksum is right, but not the tag

# result of one page of a put
UNSTORED: Final = 0
STORED: Final = 1  # in the pool, or being written by another writer
FULL: Final = 2  # not stored: the node had no room at that moment
_RESULTS: Final = {m.PRESENT: STORED, m.BUSY: STORED, m.FULL: FULL}


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
                if amount:
                    setattr(self.counters, name, getattr(self.counters, name) + amount)


def expect(opened: OpenConnection, request: m.Request, kind: type[R], deadline_s: float) -> R:
    """Call, and return a reply of `kind`.

    Raises PoolRefused for a Fault, and the errors of `Connection.call`.
    """
    return expect_all(opened, [request], kind, deadline_s)[0]


def expect_all(
    opened: OpenConnection, requests: Sequence[m.Request], kind: type[R], deadline_s: float
) -> list[R]:
    """As `expect`, for requests that are sent together. Where one is refused, what the others hold ends with
    the connection.
    """
    replies = opened.call_all(requests, deadline_s)
    opened.broken |= len(replies) > 1 and not all(isinstance(reply, kind) for reply in replies)
    return [expected(reply, kind, opened.node) for reply in replies]


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
) -> list[int | None]:
    """Read pages into their buffers. They are asked for together, in as many messages as it takes. For each
    page that is there and right its checksum, NO_CHECKSUM where its writer made none; None for the others.

    `tags`: pages in the pool end with a tag. Raises PoolError. Nothing writes into the buffers after the
    return or an error.
    """
    if tags is not None:
        trailers = np.zeros((len(keys), TAG_BYTES), np.uint8)
        pages = [[*page, trailer] for page, trailer in zip(pages, trailers, strict=True)]
    read: list[int | None] = [None] * len(keys)
    left = list(range(len(keys)))
    while left:
        parts = _parts(left, sum(segment.nbytes for segment in pages[0]))
        missed = _read_parts(opened, parts, keys, pages, deadline_s, tally, tags, read)
        # a node holds only so much for a client at a time: it may have the others too
        left = missed if len(parts) > 1 and len(missed) < len(left) else []
    return read


def _read_parts(
    opened: OpenConnection,
    parts: Sequence[list[int]],
    keys: list[bytes],
    pages: list[PageBuffers],
    deadline_s: float,
    tally: Tally,
    tags: PageTags | None,
    read: list[int | None],
) -> list[int]:
    """Ask for each of `parts`, indices of pages, in a message, and set in `read` what was read.
    Returns the indices of those that the node did not give.
    """
    segment_bytes = [segment.nbytes for segment in pages[0]]
    hold = opened.connection.is_mapped and len(keys) * sum(segment_bytes) > UNPINNED_BYTES
    pins: dict[int, m.Pin] = {}
    held: list[m.Pin] = []
    missed: list[int] = []
    below: set[int] = set()
    requests = [
        m.Get(opened.next_id(), opened.namespace, [keys[i] for i in part], segment_bytes, hold)
        for part in parts
    ]
    for part, got in zip(parts, expect_all(opened, requests, m.Got, deadline_s), strict=True):
        _check_length(opened, got.pins, part)
        for i, pin in zip(part, got.pins, strict=True):
            if pin.status == m.HIT:
                pins[i] = pin
            else:
                missed.append(i)
        if got.held:
            held += [pin for pin in got.pins if pin.status == m.HIT]
        if got.below:
            below.update(part[place] for place in got.below if 0 <= place < len(part))
    if not pins:
        return missed
    outcomes = opened.connection.read_pages([*pins.values()], [pages[i] for i in pins], deadline_s)
    if tags is not None:
        for n, i in enumerate(pins):
            if outcomes[n] == OK and not tags.fits(keys[i], pages[i][:-1], pages[i][-1]):
                outcomes[n] = FORGED
    for (i, pin), outcome in zip(pins.items(), outcomes, strict=True):
        if outcome == OK:
            read[i] = pin.checksum
    if below:
        tally.add(pages_ssd=sum(read[i] is not None for i in below))
    if held:
        with opened.best_effort():
            opened.connection.post(m.Release([pin.slot for pin in held], [pin.sequence for pin in held]))
    if any(outcomes):
        wrong = {i: outcome for i, outcome in zip(pins, outcomes, strict=True) if outcome != OK}
        _tell_wrong(opened, wrong, keys, pins, deadline_s, tally)
    return missed


def _tell_wrong(
    opened: OpenConnection,
    wrong: Mapping[int, PageOutcome],
    keys: list[bytes],
    pins: Mapping[int, m.Pin],
    deadline_s: float,
    tally: Tally,
) -> None:
    """Count pages that were read and are not right, and have the node drop them."""
    lost, corrupt, forged = (
        [i for i, outcome in wrong.items() if outcome == kind] for kind in (LOST, CORRUPT, FORGED)
    )
    tally.add(pages_lost=len(lost), pages_corrupt=len(corrupt), pages_forged=len(forged))
    for bad, what in ((corrupt, "checksum"), (forged, "tag: someone without the page key wrote them")):
        if bad:
            text = "pool node %s: %d of %d pages did not match their %s; they are recomputed"
            logger.error(text, opened.node, len(bad), len(pins), what)
    if (bad := corrupt + forged) and opened.rights & WRITE:
        # without the right, a client that has it will find the damage
        sequences = [pins[i].sequence for i in bad]
        discard = m.Discard(opened.next_id(), opened.namespace, [keys[i] for i in bad], sequences)
        with opened.best_effort():
            expect(opened, discard, m.Done, deadline_s)


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
    """Write pages. Returns UNSTORED, STORED or FULL for each; the caller counts FULL. Their slots are asked
    for together, in as many messages as it takes. Raises PoolError.
    """
    result = [UNSTORED] * len(keys)
    if not opened.rights & WRITE:
        tally.add(pages_refused=len(keys))
        return result
    left = list(range(len(keys)))
    while left:
        parts = _parts(left, sum(segment.nbytes for segment in pages[0]) + TAG_BYTES * (tags is not None))
        stored = _write_parts(opened, parts, keys, pages, deadline_s, tally, tags, result)
        # a node grants only so much at a time: it may have room for the others now
        left = [i for i in left if result[i] == FULL] if stored else []
    return result


def _write_parts(
    opened: OpenConnection,
    parts: Sequence[list[int]],
    keys: list[bytes],
    pages: list[PageBuffers],
    deadline_s: float,
    tally: Tally,
    tags: PageTags | None,
    result: list[int],
) -> int:
    """Ask for slots for each of `parts`, indices of pages, in a message; write into those that are granted,
    commit them, and set each page's `result`. Returns how many pages were written.
    """
    segment_bytes = [segment.nbytes for segment in pages[0]] + [TAG_BYTES] * (tags is not None)
    requests = [
        m.Reserve(opened.next_id(), opened.namespace, [keys[i] for i in part], segment_bytes)
        for part in parts
    ]
    granted: dict[int, m.Grant] = {}
    present = refused = written = 0
    for part, reserved in zip(parts, expect_all(opened, requests, m.Reserved, deadline_s), strict=True):
        _check_length(opened, reserved.grants, part)
        for i, grant in zip(part, reserved.grants, strict=True):
            if grant.status == m.GRANTED:
                granted[i] = grant
                continue
            result[i] = _RESULTS.get(grant.status, UNSTORED)
            present += result[i] == STORED
            refused += grant.status == m.TOO_LARGE
    if granted:
        grants = list(granted.values())
        mine = [
            pages[i] if tags is None else [*pages[i], np.frombuffer(tags.tag(keys[i], pages[i]), np.uint8)]
            for i in granted
        ]
        checksums = opened.connection.write_pages(grants, mine, deadline_s)
        slots, sequences = [grant.slot for grant in grants], [grant.sequence for grant in grants]
        commit = m.Commit(opened.next_id(), slots, sequences, checksums)
        done = _mask(opened, expect(opened, commit, m.Committed, deadline_s), grants)
        for i, committed in zip(granted, done, strict=True):
            result[i] = STORED if committed else UNSTORED
        written = sum(done)
    # counted at the end, because all of this may be repeated
    tally.add(
        pages_present=present,
        pages_refused=refused,
        pages_written=written,
        bytes_written=written * sum(segment_bytes),
    )
    return written


def _parts(indices: Sequence[int], page_bytes: int) -> list[list[int]]:
    """As many pages each as one message may be for."""
    most = m.pages_a_message(page_bytes)
    return [list(indices[start : start + most]) for start in range(0, len(indices), most)]


def ping(opened: OpenConnection, deadline_s: float) -> str:
    """Check that the node answers; its name. Raises PoolError."""
    expect(opened, m.Ping(opened.next_id()), m.Done, deadline_s)
    return opened.node


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


def _check_length(opened: OpenConnection, answers: Sequence[object], asked: Sequence[object]) -> None:
    """Raises PoolRefused if the numbers of answers and requests differ."""
    if len(answers) != len(asked):
        raise PoolRefused(f"pool node {opened.node} answered {len(answers)} of {len(asked)} keys")


def _mask(opened: OpenConnection, reply: m.Present | m.Committed, asked: Sequence[object]) -> list[bool]:
    _check_length(opened, reply.mask, asked)
    return [byte == 1 for byte in reply.mask]
