"""Reservations and commits. Pure.

A reservation ends in one of three ways:

- It is committed.
- Its writer has stopped (aborted, failed, disconnected): the slot is freed at once.
- It is overdue, and its writer may still be writing into the mapped slot. The slot is quarantined until the
  writer says that it stopped, or disconnects. When the node closed the connection, the end of the socket says
  nothing about the writer: then the slot stays in quarantine for `quarantine_s`.

Over UCX the node itself receives. It cancels the receive, and frees the slot at its TransferDone. A commit
that arrives before its receives are done is answered when they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pdserve.kvpool.core.events import Action, Answer, CancelTransfers, StartReceive
from pdserve.kvpool.core.sessions import NO_TRANSFER, Limits, PendingCommit, Reservation, Session, Tags
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.protocol.messages import (
    BUSY,
    FULL,
    GRANTED,
    MOVED,
    PRESENT,
    TOO_LARGE,
    Abort,
    Commit,
    Committed,
    Grant,
    Reserve,
    Reserved,
)
from pdserve.kvpool.protocol.slot_table import QUARANTINED

_PRESENT, _BUSY, _FULL, _TOO_LARGE = Grant(PRESENT), Grant(BUSY), Grant(FULL), Grant(TOO_LARGE)
MAX_AGE_S: Final = 1e9
NONE_REFUSED: Final[Mapping[bytes, Grant]] = {}


def no_tier(namespace: int, key: bytes) -> bool:
    """For a node without tiers."""
    return False


def no_load(namespace: int, key: bytes, out: list[Action]) -> bool:
    """For a node without tiers."""
    return False


class Writes:
    """Reservations of all sessions. `on_commit(slots, now_s, out)` is called when pages became readable. It
    returns those slots whose Commit waits for another node to take the page: `wait_for_owner(slot, commit,
    index, now_s)` is called for these, and answers the Commit when it is the last that it waited for.
    `make_room(slot_bytes, count, out)` drops what is there on trial, before other pages are evicted.
    `in_tier(namespace, key)` says whether a tier can give a page: then nobody needs to write it.
    `gives_way(namespace, key, out)` ends a load of the page that is late, and says whether there was one.
    """

    def __init__(
        self,
        store: PageStore,
        limits: Limits,
        tags: Tags,
        on_commit: Callable[[list[int], float, list[Action]], set[int]],
        wait_for_owner: Callable[[int, PendingCommit, int, float], None],
        make_room: Callable[[int, int, list[Action]], None],
        in_tier: Callable[[int, bytes], bool] = no_tier,
        gives_way: Callable[[int, bytes, list[Action]], bool] = no_load,
    ) -> None:
        self._store = store
        self._limits = limits
        self._tags = tags
        self._on_commit = on_commit
        self._wait_for_owner = wait_for_owner
        self._make_room = make_room
        self._in_tier = in_tier
        self._gives_way = gives_way
        self._receives: dict[int, Reservation] = {}  # by tag
        self._whole: list[tuple[Session, Reservation, PendingCommit]] = []  # received, to be committed
        self._timed: deque[tuple[float, int]] = deque()  # (until, slot) in quarantine, without a session
        self.commits = 0
        self.commits_refused = 0
        self.reservations_expired = 0
        self.full = 0
        self.receives_failed = 0

    # --- reserve

    def reserve(
        self,
        session: Session,
        request: Reserve,
        now_s: float,
        out: list[Action],
        refused: Mapping[bytes, Grant] = NONE_REFUSED,
    ) -> Reserved:
        """Answer with a grant per key, and return the answer. `refused`: keys that may not be written here,
        and why. A node that is full for one key is full for all keys after it. Another node is told that a
        page is not ours even if it is here: it may be dropped at any moment.
        """
        pages = self._store.index.namespace(request.namespace)
        slot_bytes = self._store.slots.class_of(sum(request.segment_bytes))
        find, writing, in_tier = pages.lookup(now_s), pages.writing, self._in_tier
        grants: list[Grant] = []
        wanted: dict[bytes, int] = {}  # place in the answer
        present: list[int] = []
        for place, key in enumerate(request.keys):
            if refused and session.peer and refused.get(key, _PRESENT).status == MOVED:
                grants.append(refused[key])
            elif (slot := find(key)) is not None:
                present.append(slot)
                grants.append(_PRESENT)
            elif in_tier(request.namespace, key):
                grants.append(_PRESENT)
            elif key in wanted or (key in writing and not self._gives_way(request.namespace, key, out)):
                grants.append(_BUSY)
            elif key in refused:
                grants.append(refused[key])
            elif slot_bytes is None:
                grants.append(_TOO_LARGE)
            else:
                wanted[key] = place
                grants.append(_FULL)
        if wanted and slot_bytes is not None:
            for slot in present:  # a page that is reported as present is not evicted for the others
                self._store.hold(slot)
            self._grant(session, request, slot_bytes, wanted, grants, now_s, out)
            for slot in present:
                self._store.let_go(slot, out)
        reserved = Reserved(request.id, grants)
        out.append(Answer(session.connection, reserved))
        return reserved

    def _may_reserve(self, session: Session, slot_bytes: int, segments: int) -> int:
        """How many more pages the client may reserve, and over UCX have under way."""
        pages = (self._limits.max_reserved_bytes - session.reserved_bytes) // slot_bytes
        if not session.mapped:
            pages = min(pages, (self._limits.max_messages - session.messages) // segments)
        return max(0, pages)

    def _grant(
        self,
        session: Session,
        request: Reserve,
        slot_bytes: int,
        wanted: Mapping[bytes, int],
        grants: list[Grant],
        now_s: float,
        out: list[Action],
    ) -> None:
        """Give slots to the first of these keys, as far as there is room."""
        store, segments = self._store, tuple(request.segment_bytes)
        pages = store.index.namespace(request.namespace)
        keys = list(wanted)[: self._may_reserve(session, slot_bytes, len(segments))]
        self._make_room(slot_bytes, len(keys), out)
        slots = store.take(pages, keys, sum(segments), slot_bytes, out)
        if len(slots) < len(wanted):
            self.full += len(wanted) - len(slots)
            without = set(list(wanted)[len(slots) :])
            for place, key in enumerate(request.keys):
                if key in without:
                    grants[place] = _FULL  # also for a key that the request names twice
        sequences, offset_of, reservations = store.facts.sequence, store.slots.offset, session.reservations
        deadline_s = now_s + self._limits.reservation_lease_s
        session.reserved_bytes += slot_bytes * len(slots)
        for slot, place in zip(slots, wanted.values(), strict=False):
            sequence, offset = sequences[slot], offset_of(slot)
            reservation = reservations[slot] = Reservation(slot, sequence, slot_bytes, deadline_s)
            if not session.mapped:
                reservation.tag = self._tags.take(len(segments))
                self._receives[reservation.tag] = reservation
                session.begin_transfer(reservation.tag, len(segments))
                out.append(StartReceive(session.connection, reservation.tag, offset, segments))
            grants[place] = Grant(GRANTED, slot, offset, sequence, reservation.tag)

    # --- commit

    def commit(self, session: Session, request: Commit, now_s: float, out: list[Action]) -> None:
        pending = PendingCommit(session.connection, request.id, bytearray(len(request.slots)), 0)
        slots, checksums, ages_s, indices = [], [], [], []
        for place, (slot, sequence, checksum) in enumerate(
            zip(request.slots, request.sequences, request.checksums, strict=True)
        ):
            reservation = session.reservations.get(slot)
            if reservation is None or reservation.sequence != sequence or reservation.commit is not None:
                self.commits_refused += 1
                self._writer_stopped(session, slot, sequence, out)
            elif reservation.tag != NO_TRANSFER:
                reservation.checksum, reservation.commit, reservation.place = checksum, pending, place
                pending.missing += 1
            else:
                self._forget(session, reservation)
                slots.append(slot)
                checksums.append(checksum)
                indices.append(place)
                if session.peer and request.ages_s:
                    ages_s.append(request.ages_s[place])
                pending.mask[place] = 1
        elsewhere = self._commit(slots, checksums, now_s, out, ages_s)
        for slot, index in zip(slots, indices, strict=True) if elsewhere else ():
            if slot in elsewhere:
                pending.mask[index] = 0
                pending.missing += 1
                self._wait_for_owner(slot, pending, index, now_s)
        if not pending.missing:
            out.append(Answer(session.connection, Committed(request.id, bytes(pending.mask))))

    def _commit(
        self,
        slots: list[int],
        checksums: list[int],
        now_s: float,
        out: list[Action],
        ages_s: Sequence[float] = (),
    ) -> set[int]:
        """Commit slots whose reservations have ended. Those that another node is to take."""
        if slots:
            for slot, checksum, age_s in zip(slots, checksums, ages_s, strict=False):
                age_s = min(age_s, MAX_AGE_S) if age_s > 0 else 0.0  # also when it is no number
                self._store.commit([slot], [checksum], now_s - age_s, out)
            if not ages_s:
                self._store.commit(slots, checksums, now_s, out)
            self.commits += len(slots)
            return self._on_commit(slots, now_s, out)
        return set()

    def _resolve(self, session: Session, reservation: Reservation, ok: bool, out: list[Action]) -> None:
        """The commit that waited for this page's receive knows its outcome."""
        pending = reservation.commit
        if pending is None:
            return
        pending.mask[reservation.place] = ok
        pending.missing -= 1
        if not pending.missing:
            out.append(Answer(session.connection, Committed(pending.request_id, bytes(pending.mask))))

    # --- ends of reservations

    def abort(self, session: Session, request: Abort, out: list[Action]) -> None:
        ended: dict[int, Reservation] = {}
        for slot, sequence in zip(request.slots, request.sequences, strict=False):
            reservation = session.reservations.get(slot)
            if reservation is not None and reservation.sequence == sequence:
                ended[slot] = reservation
            else:
                self._writer_stopped(session, slot, sequence, out)
        self._end(session, list(ended.values()), writer_stopped=True, out=out)

    def received(self, session: Session | None, tag: int, ok: bool, out: list[Action]) -> None:
        """A transfer ended; one that was not a receive is passed over. `session` is None when the client is
        gone. `commit_received` follows.
        """
        reservation = self._receives.pop(tag, None)
        if reservation is None:
            return
        reservation.tag = NO_TRANSFER
        if session is not None:
            session.end_transfer(tag)
        if self._store.state(reservation.slot) == QUARANTINED:
            if session is not None:
                del session.quarantined[reservation.slot]
                session.reserved_bytes -= reservation.slot_bytes
            self._store.give_back([reservation.slot], out)
            return
        assert session is not None, "a reservation without a session is quarantined"
        if not ok:
            self.receives_failed += 1
            self._end(session, [reservation], writer_stopped=True, out=out)
        elif reservation.commit is not None:
            self._forget(session, reservation)
            self._whole.append((session, reservation, reservation.commit))

    def commit_received(self, now_s: float, out: list[Action]) -> None:
        """Commit the pages that have been received and whose Commit waits for that."""
        if not self._whole:
            return
        whole, self._whole = self._whole, []
        slots, checksums = [one.slot for _, one, _ in whole], [one.checksum for _, one, _ in whole]
        elsewhere = self._commit(slots, checksums, now_s, out)
        for session, reservation, pending in whole:
            if reservation.slot in elsewhere:
                self._wait_for_owner(reservation.slot, pending, reservation.place, now_s)
            else:
                self._resolve(session, reservation, True, out)

    def expire(self, session: Session, now_s: float, out: list[Action]) -> None:
        due = []
        for reservation in session.reservations.values():
            if reservation.deadline_s > now_s:
                break
            due.append(reservation)
        self.reservations_expired += len(due)
        self._end(session, due, writer_stopped=False, out=out)

    def drop_namespace(self, session: Session, namespace: int, out: list[Action]) -> None:
        """End this session's reservations in a namespace that is going, or is cleared."""
        namespace_of = self._store.facts.namespace
        self.end(session, [slot for slot in session.reservations if namespace_of[slot] == namespace], out)

    def end(self, session: Session, slots: Sequence[int], out: list[Action]) -> None:
        """End those of this session's reservations that are for these slots, without a commit."""
        ended = [session.reservations[slot] for slot in slots if slot in session.reservations]
        self._end(session, ended, writer_stopped=False, out=out)

    def disconnected(self, session: Session, by_peer: bool, now_s: float, out: list[Action]) -> None:
        """End all reservations of the session. Slots that may still be written to stay in quarantine. The
        caller cancels the transfers.
        """
        ended = list(session.reservations.values())
        for reservation in ended:
            reservation.commit = None  # no client is left to answer
        self._end(session, ended, writer_stopped=by_peer, out=out, cancel=False)
        # those with a transfer under way are freed by `received`
        slots = [one.slot for one in session.quarantined.values() if one.tag == NO_TRANSFER]
        if by_peer:
            self._store.give_back(slots, out)
        else:
            self.quarantine_until(slots, now_s + self._limits.quarantine_s)
        session.quarantined.clear()

    def _end(
        self,
        session: Session,
        reservations: Sequence[Reservation],
        *,
        writer_stopped: bool,
        out: list[Action],
        cancel: bool = True,
    ) -> None:
        """End open reservations without a commit: free the slots, or quarantine them."""
        freed, tags = [], []
        for reservation in reservations:
            if reservation.tag != NO_TRANSFER or (session.mapped and not writer_stopped):
                del session.reservations[reservation.slot]
                session.quarantined[reservation.slot] = reservation
                self._store.quarantine(reservation.slot)
                if reservation.tag != NO_TRANSFER:
                    tags.append(reservation.tag)
            else:
                self._forget(session, reservation)
                freed.append(reservation.slot)
        self._store.give_back(freed, out)
        if tags and cancel:
            out.append(CancelTransfers(session.connection, tuple(tags)))
        for reservation in reservations:
            self._resolve(session, reservation, False, out)

    def _forget(self, session: Session, reservation: Reservation) -> None:
        del session.reservations[reservation.slot]
        session.reserved_bytes -= reservation.slot_bytes

    def _writer_stopped(self, session: Session, slot: int, sequence: int, out: list[Action]) -> None:
        """The writer of an overdue reservation says that it stopped writing."""
        reservation = session.quarantined.get(slot)
        if reservation is not None and reservation.sequence == sequence and reservation.tag == NO_TRANSFER:
            del session.quarantined[slot]
            session.reserved_bytes -= reservation.slot_bytes
            self._store.give_back([slot], out)

    # --- quarantine without a session

    def quarantine_until(self, slots: list[int], until_s: float) -> None:
        """A writer that nobody can ask may write into these slots until then."""
        self._timed.extend((until_s, slot) for slot in slots)

    def end_quarantine(self, now_s: float, out: list[Action]) -> None:
        due = []
        while self._timed and self._timed[0][0] <= now_s:
            due.append(self._timed.popleft()[1])
        self._store.give_back(due, out)

    def next_quarantine_end_s(self) -> float:
        return self._timed[0][0] if self._timed else float("inf")
