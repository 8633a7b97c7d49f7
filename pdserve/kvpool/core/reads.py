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

from pdserve.kvpool.core.events import Action, Answer, CancelTransfers, StartSend
from pdserve.kvpool.core.sessions import NO_TRANSFER, Limits, Session, Tags
from pdserve.kvpool.core.sessions import Pin as PinLease
from pdserve.kvpool.core.sharding.heat import Heat
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.core.tiering.coordinator import Tiers
from pdserve.kvpool.protocol.messages import HIT, MISS, Get, Got, Pin, Release

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
        tiers: Tiers,
        heat: Heat | None = None,
        replicas: Mapping[int, int] = NO_REPLICAS,
    ) -> None:
        """`replicas`: how many nodes after this one hold the page of a slot too."""
        length_of, length_bytes = self._store.facts.length_bytes, sum(request.segment_bytes)
        pages = self._store.index.namespace(request.namespace)
        find = pages.lookup(now_s)
        slot_bytes = self._store.slots.class_of(length_bytes) or 0  # of all pages of this length
        slots, missing = [], []
        for place, key in enumerate(request.keys):
            slot = find(key)
            if slot is None or length_of[slot] != length_bytes:
                missing.append(place)
            else:
                slots.append(slot)
        pins = self._pin(session, slots, slot_bytes, request, now_s, out, replicas)
        self._note(session, request, slot_bytes, slots, pins, now_s, heat)
        if missing:
            found, absent = iter(pins), set(missing)
            pins = [_MISS if place in absent else next(found) for place in range(len(request.keys))]
        # after the hits are pinned: a page that comes up takes another's place
        if missing and tiers.get(session, request, pins, missing, now_s, out):
            return
        if not session.peer:
            pages.misses += sum(pin.status == MISS for pin in pins)  # refused ones too
        ages_s: list[float] = []
        if session.peer and pages.expiry is not None:  # the page's time goes on where it goes
            committed_s = self._store.facts.committed_s
            ages_s = [now_s - committed_s[pin.slot] if pin.status == HIT else 0.0 for pin in pins]
        out.append(Answer(session.connection, Got(request.id, pins, ages_s)))

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
        """One page of a request has come up from a tier: pin it, and start sending it over UCX; a miss if the
        client holds enough.
        """
        slot_bytes = self._store.slots.slot_bytes(slot)
        pins = self._pin(session, [slot], slot_bytes, request, now_s, out, replicas)
        self._note(session, request, slot_bytes, [slot], pins, now_s, heat)
        if not session.peer and pins[0].status == HIT:
            self._store.index.namespace(request.namespace).tier_hits += 1
        return pins[0]

    def _pin(
        self,
        session: Session,
        slots: list[int],
        slot_bytes: int,
        request: Get,
        now_s: float,
        out: list[Action],
        replicas: Mapping[int, int],
    ) -> list[Pin]:
        """A pin for each slot, all of one class; a miss where the client holds enough."""
        store, leases, mapped, tag = self._store, session.pins, session.mapped, NO_TRANSFER
        checksum_of, sequence_of, offset_of = store.facts.checksum, store.facts.sequence, store.slots.offset
        limits, segments = self._limits, len(request.segment_bytes)
        deadline_s = now_s + limits.lease_s
        pins = []
        for slot in slots:
            lease = leases.get(slot)
            too_many = not mapped and session.messages + segments > limits.max_messages
            if too_many or (lease is None and session.pinned_bytes + slot_bytes > limits.max_pinned_bytes):
                self.pins_refused += 1
                pins.append(_MISS)
                continue
            sequence, offset = sequence_of[slot], offset_of(slot)
            if lease is None:
                session.pinned_bytes += slot_bytes
                lease = PinLease(slot, sequence, slot_bytes, 0, 0.0)
                store.hold(slot)
            else:
                del leases[slot]
            lease.count += 1
            lease.deadline_s = deadline_s
            leases[slot] = lease  # at the end: the last to expire
            if not mapped:
                tag = self._tags.take(segments)
                self._sends[tag] = slot
                store.hold(slot)
                session.begin_transfer(tag, segments)
                out.append(StartSend(session.connection, tag, offset, tuple(request.segment_bytes)))
            pins.append(Pin(HIT, slot, offset, checksum_of[slot], sequence, tag, replicas.get(slot, 0)))
        return pins

    def _note(
        self,
        session: Session,
        request: Get,
        slot_bytes: int,
        slots: list[int],
        pins: list[Pin],
        now_s: float,
        heat: Heat | None,
    ) -> None:
        """Those of these pages that got a pin were read. A peer that fetches pages to keep is no reader: it
        leaves no trace in recency, heat and hit rate.
        """
        read = [slot for slot, pin in zip(slots, pins, strict=True) if pin.status == HIT]
        if session.peer or not read:
            return
        pages = self._store.index.namespace(request.namespace)
        pages.hits += len(read)
        pages.read_bytes += len(read) * sum(request.segment_bytes)
        self._store.touch(pages, slot_bytes, read, now_s)
        if heat is not None:
            for slot in read:
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
