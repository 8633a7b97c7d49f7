"""Gets and their pins. Pure.

A pin is one client's lease on one slot. The page is not evicted until the client releases the pin, the lease
ends, or the client disconnects. A further read of the page renews the lease. A client that copies a few pages
at once needs no pins (`Get.hold`), and releases none: they were just read, so others are evicted before them,
and the slot table tells where one was.

A client may pin only so many bytes, and over UCX have only so many messages under way. Beyond that its reads
are misses: a queue would make it wait for what it holds itself.

Over UCX and TCP a send holds the slot too, until its TransferDone. That ends the pin of a client that wants
to hold none. The end of a lease cancels its sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdserve.kvpool.core.events import Action, Answer, CancelTransfers, StartSend
from pdserve.kvpool.core.pending_gets import PendingGets, Source
from pdserve.kvpool.core.sessions import NO_TRANSFER, Limits, PendingGet, Session, Tags
from pdserve.kvpool.core.sessions import Pin as PinLease
from pdserve.kvpool.core.store.index import NONE, NamespacePages
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.protocol.messages import HIT, MISS, Get, Got, Pin, Release

_MISS = Pin(MISS)


class Reads:
    """Pins of all sessions. Pages that are not in memory are brought by the first of `sources` that has them:
    `gets` wait for these, for `wait_s` at most.
    """

    def __init__(
        self,
        store: PageStore,
        limits: Limits,
        tags: Tags,
        gets: PendingGets,
        sources: Sequence[Source],
        wait_s: float,
    ) -> None:
        self._store = store
        self._limits = limits
        self._tags = tags
        self._gets = gets
        self._sources = sources
        self._wait_s = wait_s
        self._sends: dict[int, tuple[int, bool]] = {}  # tag -> slot held; its end ends the pin
        self.leases_expired = 0
        self.sends_failed = 0
        self.pins_refused = 0

    def get(self, session: Session, request: Get, now_s: float, out: list[Action]) -> None:
        """Answer at once, or when tiers and other nodes have brought what they have of the pages."""
        length_of, length_bytes = self._store.facts.length_bytes, sum(request.segment_bytes)
        pages = self._store.index.namespace(request.namespace)
        find = pages.lookup(now_s)
        slots, missing = [], []
        for place, key in enumerate(request.keys):
            slot = find(key)
            if slot is None or length_of[slot] != length_bytes:
                missing.append(place)
            else:
                slots.append(slot)
        if slots and session.mapped and not (request.hold or missing or session.peer):
            pins = self._show(request, pages, slots, now_s)
            out.append(Answer(session.connection, Got(request.id, pins, held=False)))
            return
        pins = self._pin(session, request, slots, now_s, out)
        if missing:
            found, absent = iter(pins), set(missing)
            pins = [_MISS if place in absent else next(found) for place in range(len(request.keys))]
        # the hits are pinned first: a page from a tier takes another page's slot
        if missing:
            get = PendingGet(session, request, pins, 0, now_s + self._wait_s)
            if self._gets.begin(get, missing, self._sources, now_s, out):
                return
        if not session.peer:
            pages.misses += sum(pin.status == MISS for pin in pins)  # refused pins too
        ages_s: list[float] = []
        if session.peer and pages.expiry is not None:  # the page expires at the same time elsewhere
            committed_s = self._store.facts.committed_s
            ages_s = [now_s - committed_s[pin.slot] if pin.status == HIT else 0.0 for pin in pins]
        out.append(
            Answer(session.connection, Got(request.id, pins, ages_s, held=request.hold or session.mapped))
        )

    def hit(self, session: Session, slot: int, request: Get, now_s: float, out: list[Action]) -> Pin:
        """Pin a page that the request has waited for. A miss if the client holds too much."""
        [pin] = self._pin(session, request, [slot], now_s, out)
        return pin

    def _pin(
        self, session: Session, request: Get, slots: list[int], now_s: float, out: list[Action]
    ) -> list[Pin]:
        """A pin for each slot, a miss where the client holds too much. All slots are of one class."""
        if not slots:
            return []
        store, leases, mapped, tag = self._store, session.pins, session.mapped, NO_TRANSFER
        checksum_of, sequence_of, offset_of = store.facts.checksum, store.facts.sequence, store.slots.offset
        limits, segments = self._limits, len(request.segment_bytes)
        slot_bytes, deadline_s = store.slots.slot_bytes(slots[0]), now_s + limits.lease_s
        pins, read = [], []
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
                self._sends[tag] = slot, not request.hold
                store.hold(slot)
                session.begin_transfer(tag, segments)
                out.append(StartSend(session.connection, tag, offset, tuple(request.segment_bytes)))
            read.append(slot)
            pins.append(Pin(HIT, slot, offset, checksum_of[slot], sequence, tag))
        if read and session.reads:
            pages = store.index.namespace(request.namespace)
            self._count(request, pages, read, now_s, peer=session.peer)
        return pins

    def _show(self, request: Get, pages: NamespacePages, slots: list[int], now_s: float) -> list[Pin]:
        """Where the pages lie, for a client that copies them at once."""
        facts, offset_of = self._store.facts, self._store.slots.offset
        checksum_of, sequence_of = facts.checksum, facts.sequence
        self._count(request, pages, slots, now_s)
        return [Pin(HIT, slot, offset_of(slot), checksum_of[slot], sequence_of[slot]) for slot in slots]

    def _count(
        self, request: Get, pages: NamespacePages, slots: list[int], now_s: float, *, peer: bool = False
    ) -> None:
        """Pages of one class were read."""
        if not peer:
            pages.hits += len(slots)
            pages.read_bytes += len(slots) * sum(request.segment_bytes)
        self._store.touch(pages, self._store.slots.slot_bytes(slots[0]), slots, now_s)

    def release(self, session: Session, request: Release, out: list[Action]) -> None:
        """Pins whose lease has ended are passed over."""
        for slot, sequence in zip(request.slots, request.sequences, strict=False):
            self._release(session, slot, sequence, out)

    def _release(self, session: Session, slot: int, sequence: int, out: list[Action]) -> None:
        pin = session.pins.get(slot)
        if pin is None or pin.sequence != sequence:
            return
        pin.count -= 1
        if pin.count == 0:
            self._unpin(session, pin, out)

    def sent(self, session: Session | None, tag: int, ok: bool, out: list[Action]) -> bool:
        """A transfer ended. False when it was not a send."""
        slot, releases = self._sends.pop(tag, (NONE, False))
        if slot == NONE:
            return False
        if session is not None:
            session.end_transfer(tag)
            self.sends_failed += not ok
            if releases:
                self._release(session, slot, self._store.facts.sequence[slot], out)
        self._store.let_go(slot, out)
        return True

    def expire(self, session: Session, now_s: float, out: list[Action]) -> None:
        if session.gets:
            self._gets.expire(session, self._sources, now_s, out)
        slots = set()
        for pin in list(_due(session, now_s)):
            self.leases_expired += 1
            self._unpin(session, pin, out)
            slots.add(pin.slot)
        # one pass for all: a stalled client may have thousands of pins and of sends
        sends = session.transfers.keys() & self._sends.keys() if slots else set()
        tags = tuple(sorted(tag for tag in sends if self._sends[tag][0] in slots))
        if tags:
            self._sends |= {tag: (self._sends[tag][0], False) for tag in tags}
            out.append(CancelTransfers(session.connection, tags))

    def disconnected(self, session: Session, out: list[Action]) -> None:
        """Sends under way hold their slots until their TransferDone."""
        self._gets.disconnected(session, self._sources)
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
