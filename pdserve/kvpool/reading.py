"""Gets and their pins. Pure.

A pin is one client's lease on one slot: the page is not evicted until it is released, its lease ends, or
the client is gone. What one client may pin, and have under way, is bounded: beyond that its reads are
misses, for a queue would only keep it waiting for what it holds itself. Reading the same page again before
that extends the one lease. Over UCX a send under way holds the slot too, by itself, until its transfer is
reported done; ending a lease cancels the sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from pdserve.kvpool.below import Below
from pdserve.kvpool.events import Action, Answer, CancelTransfers, StartSend
from pdserve.kvpool.heat import Heat
from pdserve.kvpool.leases import NO_TRANSFER, Limits, Session
from pdserve.kvpool.leases import Pin as PinLease
from pdserve.kvpool.messages import HIT, MISS, Get, Got, Pin, Release
from pdserve.kvpool.store import PageStore

_MISS = Pin(MISS)
NO_REPLICAS: Final[Mapping[int, int]] = {}


class Reads:
    """Pins of all sessions."""

    def __init__(self, store: PageStore, limits: Limits, tags: Tags) -> None:
        self._store = store
        self._limits = limits
        self._tags = tags
        self._sends: dict[int, int] = {}  # tag -> slot held
        self.leases_expired = 0
        self.sends_failed = 0
        self.pins_refused = 0

    def get(
        self,
        session: Session,
        request: Get,
        now_s: float,
        out: list[Action],
        below: Below,
        heat: Heat | None = None,
        replicas: Mapping[int, int] = NO_REPLICAS,
    ) -> None:
        """`replicas`: how many nodes after this one hold the page of a slot too."""
        facts, length_bytes = self._store.facts, sum(request.segment_bytes)
        pages = self._store.index.namespace(request.namespace)
        find = pages.lookup(now_s)
        slot_bytes = self._store.slots.class_of(length_bytes) or 0  # of all pages of this length
        pins, missing = [], []
        read: list[int] = []
        for place, key in enumerate(request.keys):
            slot = find(key)
            if slot is None or facts.length_bytes[slot] != length_bytes:
                missing.append(place)
                pins.append(_MISS)
            else:
                pins.append(self._pinned(session, slot, slot_bytes, request, now_s, out, replicas))
                if pins[-1].status == HIT:
                    read.append(slot)
        self._note(session, request, slot_bytes, read, now_s, heat)
        # after the hits are pinned: a page that comes up takes another's place
        if missing and below.get(session, request, pins, missing, now_s, out):
            return
        if not session.peer:
            pages.misses += len(missing)
        out.append(Answer(session.connection, Got(request.id, pins)))

    def hit(
        self,
        session: Session,
        slot: int,
        request: Get,
        now_s: float,
        out: list[Action],
        heat: Heat | None = None,
        replicas: Mapping[int, int] = NO_REPLICAS,
    ) -> Pin:
        """One page of a request is here: pin it, and start sending it over UCX; a miss if the client holds
        enough.
        """
        slot_bytes = self._store.slots.slot_bytes(slot)
        pin = self._pinned(session, slot, slot_bytes, request, now_s, out, replicas)
        if pin.status == HIT:
            self._note(session, request, slot_bytes, [slot], now_s, heat)
        return pin

    def _pinned(
        self,
        session: Session,
        slot: int,
        slot_bytes: int,
        request: Get,
        now_s: float,
        out: list[Action],
        replicas: Mapping[int, int],
    ) -> Pin:
        store, segments = self._store, len(request.segment_bytes)
        if not session.mapped and session.messages + segments > self._limits.max_messages:
            return self._refused()
        facts = store.facts
        sequence = facts.sequence[slot]
        lease = session.pins.pop(slot, None)
        if lease is None:
            if session.pinned_bytes + slot_bytes > self._limits.max_pinned_bytes:
                return self._refused()
            session.pinned_bytes += slot_bytes
            lease = PinLease(slot, sequence, slot_bytes, 0, 0.0)
            store.hold(slot)
        lease.count += 1
        lease.deadline_s = now_s + self._limits.lease_s
        session.pins[slot] = lease  # at the end: the last to expire
        offset = store.slots.offset(slot)
        tag = NO_TRANSFER
        if not session.mapped:
            tag = self._tags.take(segments)
            self._sends[tag] = slot
            store.hold(slot)
            session.begin_transfer(tag, segments)
            out.append(StartSend(session.connection, tag, offset, tuple(request.segment_bytes)))
        return Pin(HIT, slot, offset, facts.checksum[slot], sequence, tag, replicas.get(slot, 0))

    def _refused(self) -> Pin:
        """The client holds enough."""
        self.pins_refused += 1
        return _MISS

    def _note(
        self,
        session: Session,
        request: Get,
        slot_bytes: int,
        slots: list[int],
        now_s: float,
        heat: Heat | None,
    ) -> None:
        """These pages were read. A peer that fetches pages to keep is no reader: it leaves no trace in
        recency, heat and hit rate.
        """
        if session.peer or not slots:
            return
        pages = self._store.index.namespace(request.namespace)
        pages.hits += len(slots)
        pages.read_bytes += len(slots) * sum(request.segment_bytes)
        self._store.touch(pages, slot_bytes, slots, now_s)
        if heat is not None:
            for slot in slots:
                heat.read(slot)

    def release(self, session: Session, request: Release, out: list[Action]) -> None:
        """What is not pinned any more is passed over: its lease has ended."""
        for slot, sequence in zip(request.slots, request.sequences, strict=False):
            pin = session.pins.get(slot)
            if pin is None or pin.sequence != sequence:
                continue
            pin.count -= 1
            if pin.count == 0:
                self._unpin(session, pin, out)

    def sent(self, session: Session | None, tag: int, ok: bool, out: list[Action]) -> bool:
        """A transfer ended; False when it was none of ours."""
        slot = self._sends.pop(tag, None)
        if slot is None:
            return False
        if session is not None:
            session.end_transfer(tag)
            self.sends_failed += not ok
        self._store.let_go(slot, out)
        return True

    def expire(self, session: Session, now_s: float, out: list[Action]) -> None:
        slots = set()
        for pin in list(_due(session, now_s)):
            self.leases_expired += 1
            self._unpin(session, pin, out)
            slots.add(pin.slot)
        # one pass for all: a stalled client may have thousands of either
        tags = tuple(sorted(tag for tag in session.transfers if slots and self._sends.get(tag) in slots))
        if tags:
            out.append(CancelTransfers(session.connection, tags))

    def disconnected(self, session: Session, out: list[Action]) -> None:
        """Sends still under way hold their slots until they are reported done."""
        for pin in list(session.pins.values()):
            self._unpin(session, pin, out)

    def _unpin(self, session: Session, pin: PinLease, out: list[Action]) -> None:
        del session.pins[pin.slot]
        session.pinned_bytes -= pin.slot_bytes
        self._store.let_go(pin.slot, out)


def _due(session: Session, now_s: float) -> Iterator[PinLease]:
    for pin in session.pins.values():
        if pin.deadline_s > now_s:
            return
        yield pin


class Tags:
    """UCX tags, unique in an incarnation: a page of n segments takes n consecutive ones.

    The incarnation's low bits lead, so that a client of several nodes has no two pages with one tag.
    """

    def __init__(self, incarnation: int, first: int) -> None:
        self._next = ((incarnation & 0x7FFF) << 48) + first

    def take(self, segments: int) -> int:
        tag = self._next
        self._next += segments
        return tag
