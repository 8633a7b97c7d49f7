"""The pool node's decisions: events in, actions out. Pure, no clock, no `await`.

    shell                             NodeState.handle(event, now_s)
    Connected, Disconnected     ->    sessions: what each client holds           (leases.py)
    Received(request)           ->    reservations and commits                   (writing.py)
    TransferDone                      pins                                       (reading.py)
    Tick                              waits                                      (waits.py)
    NamespacesLearned                 namespaces and who may use them            (administration.py)
                                      pages: index, eviction, states of slots    (store.py)
    Answer, CommitRows, ...     <-

The same events at the same times give the same actions. Whatever a client sends is answered, or ends its own
connection: nothing it can send harms another's pages, which `check` asserts in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from pdserve.errors import ConfigError
from pdserve.kvpool.core.durable_answers import DurableAnswers
from pdserve.kvpool.core.events import (
    FIRST_TAG,
    Action,
    Answer,
    CancelTransfers,
    Close,
    Connected,
    Disconnected,
    Event,
    NamespacesLearned,
    NamespacesSaved,
    Received,
    RecordsForgotten,
    ReplicasMade,
    SaveNamespaces,
    Tick,
    TransferDone,
    ViewChanged,
)
from pdserve.kvpool.core.namespace_admin import Administration, Rules
from pdserve.kvpool.core.page_listing import list_pages
from pdserve.kvpool.core.reads import Reads
from pdserve.kvpool.core.sessions import Limits, Session, Tags
from pdserve.kvpool.core.sharding.coordinator import Sharding
from pdserve.kvpool.core.startup_hold import StartupHold
from pdserve.kvpool.core.status_report import report
from pdserve.kvpool.core.store.index import NONE
from pdserve.kvpool.core.store.invariants import check
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.core.store.restore import restore
from pdserve.kvpool.core.store.table_scan import TableContents
from pdserve.kvpool.core.tiering.coordinator import Tiers
from pdserve.kvpool.core.tiering.tier_index import TieringLimits, TierSpec
from pdserve.kvpool.core.waits import Waits
from pdserve.kvpool.core.writes import Writes, no_tier
from pdserve.kvpool.namespaces.catalog import Namespaces
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import (
    EndReplicas,
    ListNamespaces,
    ListOwned,
    ListPages,
    NamespaceSettings,
    PageList,
    PutNamespace,
    ReplaceNamespace,
)
from pdserve.kvpool.protocol.slot_table import RESERVED

Handler: TypeAlias = Callable[[Session, Any, float, list[Action]], None]
MAX_U64 = (1 << 64) - 1
NO_RULES: Final = Rules()


class NodeState:
    """One node. `started_s` and every `now_s` are of one monotonic clock."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        store: PageStore,
        limits: Limits,
        started_s: float,
        namespaces: Namespaces | None = None,
        rules: Rules = NO_RULES,
        tiers: Sequence[TierSpec] = (),
        tiering: TieringLimits | None = None,
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.store = store
        self.sessions: dict[int, Session] = {}
        self.next_deadline_s = float("inf")  # when the shell should Tick; never later than needed
        self._limits = limits
        self.started_s = started_s
        self.namespaces = namespaces or Namespaces()
        for namespace in self.namespaces:
            store.index.namespace(namespace.number).space = namespace.row_space
        tags = Tags(incarnation, FIRST_TAG)
        bounds = tiering or TieringLimits()
        self.tiers = Tiers(store, tiers, bounds, self._settings, self._pin, self._readable, self._found)
        self._startup_hold = StartupHold(started_s, bounds.promotion_timeout_s, tiers=bool(tiers))
        self._durable = DurableAnswers(name, self.namespaces, tiers=bool(tiers))
        self.waits = Waits(store, limits.max_waiters, self.tiers.has)
        self.reads = Reads(store, limits, tags)
        in_tier = self.tiers.has if tiers else no_tier
        self.writes = Writes(store, limits, tags, self._on_commit, in_tier)
        self.sharding = Sharding(name, store, limits.replication, self.tiers)
        self.administration = Administration(
            name,
            store.slots.capacity_bytes,
            self.namespaces,
            rules,
            self._namespace_gone,
            self._namespace_changed,
        )
        self.recovered = {"recovered_pages": 0, "dropped_rows": 0}
        self.discarded = 0
        self._handlers: dict[type, Handler] = {
            m.OpenNamespace: self._administer,
            m.DropNamespace: self._administer,
            PutNamespace: self._administer,
            ReplaceNamespace: self._administer,
            ListNamespaces: self._administer,
            m.Exists: self._exists,
            m.Reserve: self._reserve,
            m.Commit: self._commit,
            m.Abort: lambda session, request, now_s, out: self.writes.abort(session, request, out),
            m.Get: self._get,
            m.Release: lambda session, request, now_s, out: self.reads.release(session, request, out),
            m.Wait: self._wait,
            m.Discard: self._discard,
            m.Clear: self._clear,
            ListOwned: self._list_owned,
            EndReplicas: self._end_replicas,
            m.Ping: self._ping,
            m.Status: self._status,
            ListPages: self._list_pages,
        }

    def restore(self, contents: TableContents, now_s: float) -> None:
        """Take over an earlier incarnation's pages; before the first event."""
        restore(self.store, contents, now_s)
        self.writes.quarantine_until(contents.quarantined, now_s + self._limits.quarantine_s)
        self.recovered = {"recovered_pages": len(contents.slots), "dropped_rows": len(contents.dropped)}
        self._find_next_deadline()

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """What to do about the event, in order."""
        out: list[Action] = []
        if isinstance(event, Received):
            self._received(event, now_s, out)
        elif isinstance(event, Tick):
            self._tick(now_s, out)
        elif isinstance(event, TransferDone):
            session = self.sessions.get(event.connection)
            if not self.reads.sent(session, event.tag, event.ok, out):
                self.writes.received(session, event.tag, event.ok, now_s, out)
        elif isinstance(event, Connected):
            assert event.connection not in self.sessions
            self.sessions[event.connection] = Session(
                event.connection, event.data_path, event.client, event.peer, event.token
            )
        elif isinstance(event, ViewChanged):
            self.sharding.view_changed(event, now_s)
            self._expect(self.sharding.next_deadline_s)
        elif isinstance(event, ReplicasMade):
            self.sharding.replicas_made(event, now_s)
        elif isinstance(event, NamespacesLearned):
            self.administration.learn(event.records, out)
        elif isinstance(event, RecordsForgotten):
            self.administration.forget(event.names, event.floors, out)
        elif isinstance(event, NamespacesSaved):
            self._durable.saved(event, out)
        elif isinstance(event, Disconnected):
            self._disconnected(event, now_s, out)
        else:
            was_ready = self.tiers.ready
            self.tiers.handle(event, now_s, out)
            if self.tiers.ready and not was_ready:
                self._answer_early(self._startup_hold.end(), now_s, out)
                self.sharding.ownership.tiers_ready(now_s)
                self._expect(self.sharding.next_deadline_s)
            self._expect(now_s + self._limits.lease_s)
        self.tiers.pump(now_s, out)
        self._expect(min(self.store.next_work_s, self.tiers.next_deadline_s))
        return out

    # --- events

    def _received(self, event: Received, now_s: float, out: list[Action], *, late: bool = False) -> None:
        """`late`: it has waited for the tiers."""
        session = self.sessions.get(event.connection)
        if session is None:
            return  # it was closed, and this was still in its buffer
        fault = self.administration.refusal(session, event.message)
        if fault is not None:
            out.append(Answer(event.connection, fault))
            return
        handler = self._handlers.get(type(event.message))
        if handler is None:
            out.append(Close(event.connection, f"unexpected {type(event.message).__name__}"))
            return
        namespace = getattr(event.message, "namespace", None)
        if namespace is not None and namespace not in self.namespaces:
            message = f"node {self.name} has no namespace number {namespace}: it was dropped; open it again"
            request_id: int = getattr(event.message, "id", 0)
            out.append(Answer(event.connection, m.Fault(request_id, "unknown_namespace", message)))
            return
        if self._startup_hold.open and not late and self._waits_for_tiers(event, session, now_s):
            return
        if namespace is not None:
            self.store.index.namespace(namespace).operations += 1
        if session.data_path == "none" and isinstance(event.message, m.Reserve | m.Get):
            message = "this connection is for questions only"
            out.append(Answer(event.connection, m.Fault(event.message.id, "no_data_path", message)))
            return
        handler(session, event.message, now_s, out)

    def _waits_for_tiers(self, event: Received, session: Session, now_s: float) -> bool:
        """Whether it asks for a page that is not in memory and may turn out to be in a tier."""
        request = event.message
        if session.peer or not isinstance(request, m.Exists | m.Get):
            return False
        find, has = self.store.index.namespace(request.namespace).lookup(now_s), self.tiers.has
        known = all(find(key) is not None or has(request.namespace, key) for key in request.keys)
        if known or not self._startup_hold.hold(event, now_s):
            return False
        self._expect(self._startup_hold.next_deadline_s)
        return True

    def _answer_early(self, events: list[Received], now_s: float, out: list[Action]) -> None:
        for event in events:
            self._received(event, now_s, out, late=True)

    def refusal(self, connection: int, message: m.Request) -> m.Fault | None:
        """Why the client may not ask this, of somebody else in the node; None when it may."""
        session = self.sessions.get(connection)
        return None if session is None else self.administration.refusal(session, message)

    def may_not(self, session: Session, message: m.Request) -> bool:
        """Whether `handle` would refuse this for want of a right."""
        return self.administration.lacks_right(session, message)

    def _tick(self, now_s: float, out: list[Action]) -> None:
        self._answer_early(self._startup_hold.due(now_s), now_s, out)
        for session in self.sessions.values():
            self.waits.expire(session, now_s, out)
            self.tiers.expire(session, now_s, out)
            self.reads.expire(session, now_s, out)
            self.writes.expire(session, now_s, out)
        self.writes.end_quarantine(now_s, out)
        self._durable.expire(now_s, out)
        self.sharding.tick(now_s, out)
        self.store.tick(now_s, out)
        self.tiers.pump(now_s, out)
        self._find_next_deadline()

    def _disconnected(self, event: Disconnected, now_s: float, out: list[Action]) -> None:
        session = self.sessions.pop(event.connection, None)
        if session is None:
            return
        self._startup_hold.gone(event.connection)
        self.waits.disconnected(session)
        self.tiers.disconnected(session)
        self.reads.disconnected(session, out)
        self.writes.disconnected(session, event.by_peer, now_s, out)
        out[:] = [action for action in out if not isinstance(action, CancelTransfers)]
        if session.transfers:
            out.append(CancelTransfers(event.connection, tuple(sorted(session.transfers))))
        self._expect(self.writes.next_quarantine_end_s())

    # --- namespaces

    def _administer(self, session: Session, request: m.Request, now_s: float, out: list[Action]) -> None:
        self.administration.handle(session, request, out)
        self._hold(now_s, out, voids=isinstance(request, m.DropNamespace | ReplaceNamespace))

    def _clear(self, session: Session, request: m.Clear, now_s: float, out: list[Action]) -> None:
        for other in self.sessions.values():  # what is in these slots may be of before
            self.writes.drop_namespace(other, request.namespace, out)
        row_space = self.namespaces.clear(request.namespace)
        count = self.tiers.clear(request.namespace, self.namespaces[request.namespace].tier_space, out)
        count += self.store.clear(request.namespace, row_space, out)
        out.append(SaveNamespaces(self.namespaces.dump(), self.namespaces.revision))
        out.append(Answer(session.connection, m.Done(request.id, count)))
        self._hold(now_s, out)

    def _hold(self, now_s: float, out: list[Action], *, voids: bool = False) -> None:
        """Let the answer wait until what it says is durable."""
        self._durable.hold(now_s, out, voids=voids)
        self._expect(self._durable.next_deadline_s)

    def _namespace_gone(self, number: int, out: list[Action]) -> int:
        """Free all that a namespace had; how many pages. Its number is unknown already."""
        for session in self.sessions.values():
            self.writes.drop_namespace(session, number, out)
            self.waits.drop_namespace(session, number, out)
        count = self.tiers.clear(number, None, out)
        count += self.store.clear(number, number, out)
        self.store.forget(number)
        return count

    def _settings(self, namespace: int) -> NamespaceSettings | None:
        """None when there is no such namespace any more."""
        return self.namespaces.settings(namespace) if namespace in self.namespaces else None

    def _namespace_changed(self, number: int, settings: NamespaceSettings) -> None:
        """It was opened, or has other settings now."""
        self.tiers.configured(number, self.namespaces[number].tier_space)
        ttl_s, quota_bytes = settings.ttl_s or None, settings.quota_bytes or None
        try:
            self.store.configure_namespace(
                number, policy=settings.policy, ttl_s=ttl_s, quota_bytes=quota_bytes
            )
        except ConfigError:  # of a newer node: its bounds hold, whatever order it wants
            ttl_s = ttl_s if ttl_s is not None and ttl_s > 0 else None
            self.store.configure_namespace(number, ttl_s=ttl_s, quota_bytes=quota_bytes)

    # --- pages

    def _exists(self, session: Session, request: m.Exists, now_s: float, out: list[Action]) -> None:
        find = self.store.index.namespace(request.namespace).lookup(now_s)
        has, namespace = self.tiers.has, request.namespace
        mask = bytes([find(key) is not None or has(namespace, key) for key in request.keys])
        out.append(Answer(session.connection, m.Present(request.id, mask)))

    def _reserve(self, session: Session, request: m.Reserve, now_s: float, out: list[Action]) -> None:
        slot_bytes = self.store.slots.class_of(sum(request.segment_bytes))
        refused = self.sharding.refusals(session, request, slot_bytes)
        reserved = self.writes.reserve(session, request, now_s, out, refused)
        self.sharding.reserved(session, request, reserved, slot_bytes, now_s)
        self._expect(min(now_s + self._limits.reservation_lease_s, self.sharding.next_deadline_s))

    def _commit(self, session: Session, request: m.Commit, now_s: float, out: list[Action]) -> None:
        same_length = len(request.slots) == len(request.sequences) == len(request.checksums)
        same_length = same_length and len(request.ages_s) in (0, len(request.slots))
        checksums = request.checksums or [0]
        if not same_length or min(checksums) < 0 or max(checksums) > MAX_U64:
            message = "slots, sequences and checksums must be of one length, checksums of 64 bits"
            out.append(Answer(session.connection, m.Fault(request.id, "bad_request", message)))
            return
        self.writes.commit(session, request, now_s, out)

    def _on_commit(self, slots: list[int], now_s: float, out: list[Action]) -> None:
        """Clients wrote these."""
        if self.tiers.any:
            for slot in slots:
                self.tiers.committed(slot)
        self._readable(slots, now_s, out)

    def _readable(self, slots: list[int], now_s: float, out: list[Action]) -> None:
        facts = self.store.facts
        for slot in slots if self.waits.open else ():
            key = facts.key[slot]
            assert key is not None
            self._found(facts.namespace[slot], key, now_s, out)
        self.sharding.filled(slots)

    def _found(self, namespace: int, key: bytes, now_s: float, out: list[Action]) -> None:
        self.waits.committed(namespace, key, self.sessions, now_s, out)

    def _get(self, session: Session, request: m.Get, now_s: float, out: list[Action]) -> None:
        sharding = self.sharding
        heat, replicas = sharding.heat, sharding.replication.counts
        self.reads.get(session, request, now_s, out, self.tiers, heat, replicas)
        self._expect(session.next_deadline_s())

    def _pin(self, session: Session, slot: int, request: m.Get, now_s: float, out: list[Action]) -> m.Pin:
        """For a page that came up from a tier."""
        heat, replicas = self.sharding.heat, self.sharding.replication.counts
        return self.reads.hit(session, slot, request, now_s, out, heat, replicas)

    def _wait(self, session: Session, request: m.Wait, now_s: float, out: list[Action]) -> None:
        self.waits.begin(session, request, now_s, out)
        waiter = session.waiters.get(request.id)
        if waiter is not None:
            self._expect(waiter.deadline_s)

    def _discard(self, session: Session, request: m.Discard, now_s: float, out: list[Action]) -> None:
        count = 0
        for key, sequence in zip(request.keys, request.sequences, strict=False):
            slot = self.store.find(request.namespace, key)
            if slot != NONE and self.store.facts.sequence[slot] == sequence:
                self.store.drop(slot, out)
                self.tiers.forget(request.namespace, [key], out)
                count += 1
        self.discarded += count
        out.append(Answer(session.connection, m.Done(request.id, count)))

    # --- other nodes

    def _list_owned(self, session: Session, request: ListOwned, now_s: float, out: list[Action]) -> None:
        out.append(Answer(session.connection, self.sharding.list_owned(request)))

    def _end_replicas(self, session: Session, request: EndReplicas, now_s: float, out: list[Action]) -> None:
        out.append(Answer(session.connection, self.sharding.end_replicas(request, out)))

    # --- the node

    def _ping(self, session: Session, request: m.Ping, now_s: float, out: list[Action]) -> None:
        out.append(Answer(session.connection, m.Done(request.id)))

    def _status(self, session: Session, request: m.Status, now_s: float, out: list[Action]) -> None:
        out.append(Answer(session.connection, self.status(request.id, now_s, session)))

    def _list_pages(self, session: Session, request: ListPages, now_s: float, out: list[Action]) -> None:
        namespace = self.namespaces.find(request.name)
        if namespace is None:
            message = f"node {self.name} has no namespace '{request.name}'"
            out.append(Answer(session.connection, m.Fault(request.id, "unknown_namespace", message)))
            return
        asker = f"client {session.connection}"
        pages, cursor = list_pages(
            self.store, self.sharding, self.tiers, namespace.number, request.cursor, request.limit, asker
        )
        out.append(Answer(session.connection, PageList(request.id, pages, cursor)))

    def status(self, request_id: int, now_s: float, session: Session | None = None) -> m.StatusReport:
        """How the node is; for a client without the namespaces that it may not read."""
        return report(self, request_id, now_s, session)

    # --- time

    def _expect(self, deadline_s: float) -> None:
        self.next_deadline_s = min(self.next_deadline_s, deadline_s)

    def _find_next_deadline(self) -> None:
        deadlines = [session.next_deadline_s() for session in self.sessions.values()]
        more = (
            self.writes.next_quarantine_end_s(),
            self._durable.next_deadline_s,
            self.sharding.next_deadline_s,
            self.store.next_work_s,
            self.tiers.next_deadline_s,
            self._startup_hold.next_deadline_s,
        )
        self.next_deadline_s = min([*deadlines, *more])

    def check(self) -> None:
        """Assert that everything is conserved and nothing is owned by nobody. Slow: for tests."""
        check(self.store)
        self.waits.check()
        self.tiers.check()
        self.sharding.replicas.check()
        reserved = [slot for session in self.sessions.values() for slot in session.reservations]
        reserved += self.tiers.reserved_slots()
        assert sorted(reserved) == self.store.slots_in_state(RESERVED)
        for session in self.sessions.values():
            held = [*session.reservations.values(), *session.quarantined.values()]
            assert session.reserved_bytes == sum(reservation.slot_bytes for reservation in held)
            assert session.reserved_bytes <= self._limits.max_reserved_bytes
