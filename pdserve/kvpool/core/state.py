"""The pool node's decisions: events in, actions out. Pure: no clock, no `await`, no I/O.

    shell                             NodeState.handle(event, now_s)
    Connected, Disconnected     ->    sessions: what each client holds           sessions.py
    Received(request)           ->    reservations and commits                   writes.py
    TransfersDone                     gets and pins                              reads.py
    Tick                              waits                                      waits.py
    RecordsLearned                    namespaces and who may use them            namespace_admin.py
    PagesStored, PagesLoaded, ...     pages in tiers                             tiering/
    ViewChanged, PagesFetched, ...    pages of other nodes                       sharding/
                                      pages in memory                            store/
    Answer, CommitRows, ...     <-

The same events at the same times give the same actions. Each request is answered, or ends its connection.
No request can harm pages of another client; `check` asserts this in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, assert_never

import numpy as np

from pdserve.errors import ConfigError
from pdserve.kvpool.core.durable_answers import DurableAnswers, Erasures
from pdserve.kvpool.core.events import (
    FIRST_TAG,
    LOCAL,
    Action,
    Answer,
    CancelTransfers,
    Close,
    Connected,
    Disconnected,
    Event,
    NamespacesSaved,
    PagesErased,
    PagesFetched,
    PagesFound,
    PagesGone,
    PagesLoaded,
    PagesPushed,
    PagesSeen,
    PagesStored,
    Received,
    RecordsLearned,
    SaveNamespaces,
    Tick,
    TransfersDone,
    ViewChanged,
)
from pdserve.kvpool.core.kept_pages import KeptPages
from pdserve.kvpool.core.lookups import Lookups, PageListing, PlaceChanges
from pdserve.kvpool.core.namespace_admin import Administration, AdminRequest, Rules
from pdserve.kvpool.core.pending_gets import PendingGets
from pdserve.kvpool.core.reads import Reads
from pdserve.kvpool.core.report import report
from pdserve.kvpool.core.sessions import Due, Limits, Session, Tags
from pdserve.kvpool.core.sharding.coordinator import Sharding
from pdserve.kvpool.core.store.index import NONE, Family
from pdserve.kvpool.core.store.invariants import check
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.core.store.table_scan import TableContents, restore
from pdserve.kvpool.core.tiering.coordinator import Tiers, facts_of
from pdserve.kvpool.core.tiering.tier_index import TieringLimits, TierSpec
from pdserve.kvpool.core.waits import Waits
from pdserve.kvpool.core.writes import Writes, no_tier
from pdserve.kvpool.namespaces.catalog import Namespace, Namespaces
from pdserve.kvpool.namespaces.tenants import split
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import (
    Drain,
    GetView,
    Gossip,
    ListNamespaces,
    ListPages,
    NamespaceSettings,
    PageEntry,
    PageList,
    ProbePeer,
    PutNamespace,
    ReplaceNamespace,
    Upgrade,
)
from pdserve.kvpool.protocol.slot_table import COMMITTED, RESERVED

MAX_U64: Final = (1 << 64) - 1
SAVE_S: Final = 24 * 3600.0  # between saves of the list of namespaces: they tell how long a node was away
NO_RULES: Final = Rules()
READ_ONLY: Final = frozenset((m.Exists, m.Ping, m.Status, ListNamespaces, ListPages))
ADMINISTRATION: Final = frozenset((m.OpenNamespace, m.DropNamespace, PutNamespace, ReplaceNamespace))


class NodeState:
    """One node. `started_s` and every `now_s` are times of one monotonic clock."""

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
        follows_places: bool = False,
        started_ms: int = 0,
    ) -> None:
        """`started_ms`: the clock's millisecond at `started_s`."""
        self.name = name
        self.incarnation = incarnation
        self.started_s = started_s
        self.recovered = {"recovered_pages": 0, "dropped_rows": 0}
        self.discarded = 0
        self.sessions: dict[int, Session] = {}
        self._due = Due()
        self._judging: int | None = None  # the registry's changes when the request that is judged came
        self.store = store
        self._limits = limits
        tags, tiering = Tags(incarnation, FIRST_TAG), tiering or TieringLimits()
        gets, wait_s = PendingGets(store, self._pin), tiering.promotion_timeout_s
        self.tiers = Tiers(store, tiers, tiering, self._settings, gets, self._readable, self._found)
        self.sharding = Sharding(name, store, limits, self.tiers, gets, self._readable)
        self.waits = Waits(store, limits.max_waiters, limits.max_waited_keys, self.tiers.has, self._may_read)
        self.reads = Reads(store, limits, tags, gets, (self.tiers, self.sharding.fetches), wait_s)
        self.writes = Writes(
            store,
            limits,
            tags,
            self._written,
            self.sharding.forwards.begin,
            self.sharding.fetches.make_room,
            self.tiers.has if tiers else no_tier,
            self.tiers.give_way,
        )
        self.kept = KeptPages(store, self.tiers, limits.max_kept_bytes)
        self._listing = PageListing(store, self.sharding, self.tiers)
        self._lookups = Lookups(store, self.tiers)
        self._places = PlaceChanges(store, self.tiers) if follows_places else None
        # namespaces: last, since those that exist are announced to the store at once
        self.namespaces = namespaces or Namespaces()
        self._families: dict[str, Family] = {}  # by the name of the model's namespace
        self._started_ms = self.namespaces.registry.now_ms = started_ms
        self._save_at_s = started_s + SAVE_S
        self._durable = DurableAnswers(name, self.namespaces, tiers=bool(tiers))
        self._erasures = Erasures(name, store, self._durable)
        slots = store.slots
        self.administration = Administration(
            name,
            slots.capacity_bytes,
            slots.slab_bytes,
            self.namespaces,
            rules,
            self._gone,
            self._void,
            self._changed,
            started_ms,
        )

    @property
    def unchanged(self) -> bool:
        """After an exception out of `handle`: whether the event had changed nothing of the state yet, so that
        it may be served on. True while a request is judged or only read for; a change of namespaces is
        judged to its end before the registry takes it.
        """
        judged = self._judging
        return judged is not None and self.namespaces.registry.changes == judged

    def restore(self, contents: TableContents, now_s: float) -> None:
        """Take over the pages of an earlier incarnation; before the first event."""
        restore(self.store, contents, now_s)
        self.writes.quarantine_until(contents.quarantined, now_s + self._limits.quarantine_s)
        self.recovered = {"recovered_pages": len(contents.slots), "dropped_rows": len(contents.dropped)}

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Process the event. Returns the actions, in order."""
        out: list[Action] = []
        self.store.now_s = now_s
        self.namespaces.registry.now_ms = self._started_ms + int((now_s - self.started_s) * 1000)
        self._judging = None
        match event:
            case Received():
                self._judging = self.namespaces.registry.changes
                self._received(event, now_s, out)
                self._judging = None
            case Tick():
                self._tick(now_s, out)
            case TransfersDone():
                for one in event.done:
                    session = self.sessions.get(one.connection)
                    if not self.reads.sent(session, one.tag, one.ok, out):
                        self.writes.received(session, one.tag, one.ok, out)
                self.writes.commit_received(now_s, out)
            case Connected():
                assert event.connection not in self.sessions
                self.sessions[event.connection] = Session(
                    event.connection, event.data_path, event.client, event.peer, event.token
                )
            case Disconnected():
                self._disconnected(event, now_s, out)
            case PagesFound() | PagesStored() | PagesGone() | PagesLoaded():
                was_ready = self.tiers.ready
                self.tiers.handle(event, now_s, out)
                if self.tiers.ready and not was_ready:
                    self.sharding.ownership.tiers_ready(now_s)
            case PagesErased():
                self._erasures.erased(event, now_s, out)
            case NamespacesSaved():
                self._durable.saved(event, out)
            case ViewChanged():
                self.sharding.view_changed(event, now_s, out)
            case PagesPushed():
                self.sharding.pushed(event, now_s, out)
            case PagesFetched():
                self.sharding.fetched(event, now_s, out)
            case PagesSeen():
                self.waits.seen(event.namespace, event.keys, self.sessions, now_s, out)
            case RecordsLearned():
                self.administration.learn(event.records, out)
            case _:
                assert_never(event)
        self.tiers.pump(now_s, out)
        self.sharding.pump(now_s, out)
        if self._places is not None:
            self._places.tell(out)
        return out

    # --- requests

    def _received(self, event: Received, now_s: float, out: list[Action]) -> None:
        session, message = self.sessions.get(event.connection), event.message
        if session is None:
            return  # the connection was closed while this was in its buffer
        fault = self.administration.refusal(session, message)
        if fault is not None:
            out.append(Answer(event.connection, fault))
            return
        namespace: int | None = getattr(message, "namespace", None)
        if namespace is not None:
            fault = self._namespace_fault(namespace, message)
            if fault is not None:
                out.append(Answer(event.connection, fault))
                return
            self.store.index.namespace(namespace).operations += 1
            if session.data_path == "none" and isinstance(message, m.Reserve | m.Get):
                text = "this connection moves no pages"
                out.append(Answer(event.connection, m.Fault(message.id, "no_data_path", text)))
                return
        self._serve(session, message, now_s, out)

    def _serve(self, session: Session, message: m.Request, now_s: float, out: list[Action]) -> None:
        """Carry out a request that the client may make, and answer it."""
        if type(message) not in READ_ONLY and type(message) not in ADMINISTRATION:
            self._judging = None
        match message:
            case m.Get():
                self.reads.get(session, message, now_s, out)
                if session.pins or session.gets:
                    self._due.expect(session)
            case m.Release():
                self.reads.release(session, message, out)
            case m.Exists():
                self.sharding.look_up(session, message, self._lookups.answer(message, now_s), out)
                if message.keep_s or message.move:
                    self._judging = None
                    may_write = bool(self.administration.rights(session, message.namespace) & m.WRITE)
                    self.kept.ask(message, now_s, out, may_write=may_write)
            case m.Reserve():
                self._reserve(session, message, now_s, out)
            case m.Commit():
                self._commit(session, message, now_s, out)
            case m.Abort():
                self.writes.abort(session, message, out)
            case m.Wait():
                missing = self.waits.begin(session, message, now_s, out)
                self.sharding.watch(session, message, missing, out)
                self._due.expect(session)
            case m.Discard():
                self._discard(session, message, out)
            case m.Erase():
                self._erase(session, message, now_s, out)
            case m.Clear():
                self._clear(session, message, now_s, out)
            case (
                m.OpenNamespace() | m.DropNamespace() | PutNamespace() | ReplaceNamespace() | ListNamespaces()
            ):
                self._administer(session, message, now_s, out)
            case m.Ping():
                out.append(Answer(session.connection, m.Done(message.id)))
            case m.Status():
                out.append(Answer(session.connection, self.status(message.id, now_s, session)))
            case ListPages():
                out.append(Answer(session.connection, self._list_pages(session, message)))
            case m.Hello() | m.Proof():
                out.append(Close(session.connection, "a second Hello"))
            case GetView() | Gossip() | ProbePeer() | Drain() | Upgrade():
                out.append(Close(session.connection, f"unexpected {type(message).__name__}"))
            case _:
                assert_never(message)

    def _namespace_fault(self, namespace: int, message: m.Request) -> m.Fault | None:
        """Why a request that names this number cannot be carried out; None when it can."""
        if namespace in self.namespaces:
            return None
        text = f"node {self.name} has no namespace number {namespace}: it was dropped; open it again"
        return m.Fault(getattr(message, "id", 0), "unknown_namespace", text)

    def refusal(self, connection: int, message: m.Request) -> m.Fault | None:
        """Why the client may not ask another part of the node for this; None when it may."""
        session = self.sessions.get(connection)
        return None if session is None else self.administration.refusal(session, message)

    def may_not(self, session: Session, message: m.Request) -> bool:
        """Whether `handle` would refuse this because a right is missing."""
        return not self.administration.authorized(session, message)

    # --- time and connections

    def _tick(self, now_s: float, out: list[Action]) -> None:
        for session in self._due.take(self.sessions, now_s):
            self.waits.expire(session, now_s, out)
            self.reads.expire(session, now_s, out)
            self.writes.expire(session, now_s, out)
            self._due.expect(session)
        self.writes.end_quarantine(now_s, out)
        self._durable.expire(now_s, out)
        if now_s >= self._save_at_s:
            self._save_at_s = now_s + SAVE_S
            out.append(SaveNamespaces(self.namespaces.dump(), self.namespaces.revision))
        self.sharding.tick(now_s, out)
        self.store.tick(now_s, out)
        self._erasures.pump(now_s, out)
        self.kept.tick(now_s)
        self.tiers.pump(now_s, out)

    def _disconnected(self, event: Disconnected, now_s: float, out: list[Action]) -> None:
        session = self.sessions.pop(event.connection, None)
        if session is None:
            return
        self._listing.gone(event.connection)
        self.waits.disconnected(session)
        self.sharding.forwards.disconnected(event.connection)
        self.reads.disconnected(session, out)
        self.writes.disconnected(session, event.by_peer, now_s, out)
        if session.transfers:
            out.append(CancelTransfers(event.connection, tuple(sorted(session.transfers))))

    # --- namespaces

    def _administer(self, session: Session, request: AdminRequest, now_s: float, out: list[Action]) -> None:
        reply = self.administration.handle(session, request, out)
        voids = isinstance(request, m.DropNamespace | ReplaceNamespace)
        if voids and isinstance(reply, m.Done):
            self._erasures.answer(session.connection, reply, now_s, out, voids=True)
        else:
            self._answer_durably(session, reply, now_s, out, voids=voids)

    def _clear(self, session: Session, request: m.Clear, now_s: float, out: list[Action]) -> None:
        model, count = self.namespaces[request.namespace], 0
        for number in (model.number, *(one.number for one in self.namespaces.tenants(model.name))):
            count += self._emptied(number, out)
        out.append(SaveNamespaces(self.namespaces.dump(), self.namespaces.revision))
        self._answer_durably(session, m.Done(request.id, count), now_s, out)

    def _void(self, number: int, out: list[Action]) -> None:
        """Leave no byte of a namespace's pages here."""
        self.store.wipe_when_free(self.store.slots_of(number))
        self.tiers.erase(number, None, self._erasures.begin(has_tiers=self.tiers.any), out)
        self._emptied(number, out, erases=True)
        out.append(SaveNamespaces(self.namespaces.dump(), self.namespaces.revision))

    def _emptied(self, number: int, out: list[Action], *, erases: bool = False) -> int:
        """Void the pages of a namespace that stays; their number."""
        self.sharding.fetches.clear(number, self.store.now_s, out)
        for session in self.sessions.values():  # a slot reserved before the clear may hold old bytes
            self.writes.drop_namespace(session, number, out)
        space = self.namespaces.clear(number)
        count = self.tiers.clear(number, space, out)
        return count + self.store.clear(number, space, out, erases=erases)

    def _answer_durably(
        self, session: Session, reply: m.Reply, now_s: float, out: list[Action], *, voids: bool = False
    ) -> None:
        """Answer the client. If the request voids pages, the answer waits until this is durable."""
        self._durable.answer(session.connection, reply, now_s, out, voids=voids)

    def _gone(self, number: int, is_tenant: bool, out: list[Action]) -> int:
        """Free everything that a namespace had; the number of its pages. Its number is unknown already."""
        if is_tenant:
            self.store.wipe_when_free(self.store.slots_of(number))
        for session in self.sessions.values():
            self.writes.drop_namespace(session, number, out)
            self.waits.drop_namespace(session, number, out)
        self.sharding.fetches.clear(number, self.store.now_s, out)
        if is_tenant:
            self.tiers.erase(number, None, self._erasures.begin(has_tiers=self.tiers.any), out)
        count = self.tiers.clear(number, None, out)
        count += self.store.clear(number, 0, out, erases=is_tenant)
        self.store.forget(number)
        self.sharding.configure(number, 1)
        return count

    def _may_read(self, session: Session, number: int) -> bool:
        return bool(self.administration.rights(session, number) & m.READ)

    def _changed(self, number: int, settings: NamespaceSettings) -> None:
        """The namespace was opened, or its settings changed."""
        namespace = self.namespaces[number]
        family = self._family(namespace)
        self.store.index.namespace(number).space = namespace.space
        self.tiers.configured(number, namespace.space, facts_of(namespace))
        if namespace.geometry.get("parts"):
            self.store.relate(number)
        self.sharding.configure(number, settings.copies)
        ttl_s, quota_bytes, policy = settings.ttl_s or None, settings.quota_bytes or None, settings.policy
        try:
            self.store.configure_namespace(
                number, policy=policy, ttl_s=ttl_s, quota_bytes=quota_bytes, family=family
            )
        except ConfigError:  # another node's plug-in, which is not installed here: keep the bounds
            self.store.configure_namespace(number, ttl_s=ttl_s, quota_bytes=quota_bytes, family=family)

    def _family(self, namespace: Namespace) -> Family | None:
        """With whom the namespace shares its model's quotas; None: with nobody so far."""
        model, tenant = split(namespace.name)
        if not tenant and model not in self._families:
            return None
        family = self._families.setdefault(model, Family())
        record = self.namespaces.registry.get(model)
        settings = NamespaceSettings() if record is None else record.settings
        family.quota_bytes, family.tier_quota_bytes = settings.quota_bytes or None, settings.tier_quota_bytes
        parent = self.namespaces.find(model)
        if parent is not None and (pages := self.store.index.namespace(parent.number)).family is None:
            pages.family = family
            family.members.append(pages)
        return family

    def _settings(self, namespace: int) -> NamespaceSettings | None:
        """The namespace's settings, or None if it was dropped."""
        return self.namespaces.settings(namespace) if namespace in self.namespaces else None

    # --- pages

    def _reserve(self, session: Session, request: m.Reserve, now_s: float, out: list[Action]) -> None:
        slot_bytes = self.store.slots.class_of(sum(request.segment_bytes))
        refused = self.sharding.refusals(session, request)
        reserved = self.writes.reserve(session, request, now_s, out, refused)
        self.sharding.reserved(session, request, reserved, slot_bytes, now_s)
        self._due.expect(session)

    def _commit(self, session: Session, request: m.Commit, now_s: float, out: list[Action]) -> None:
        same_length = len(request.slots) == len(request.sequences) == len(request.checksums)
        same_length = same_length and len(request.ages_s) in (0, len(request.slots))
        checksums = request.checksums or [0]
        if not same_length or min(checksums) < 0 or max(checksums) > MAX_U64:
            text = "slots, sequences and checksums must be of one length, checksums of 64 bits"
            out.append(Answer(session.connection, m.Fault(request.id, "bad_request", text)))
            return
        namespace_of = self.store.facts.namespace
        for number in {namespace_of[slot] for slot in request.slots if slot in session.reservations}:
            if not self.administration.rights(session, number) & m.WRITE:  # its token was changed meanwhile
                self.writes.drop_namespace(session, number, out)
        self.writes.commit(session, request, now_s, out)

    def _written(self, slots: list[int], now_s: float, out: list[Action]) -> set[int]:
        """These pages were committed. Returns those whose Commit waits for the nodes that own them."""
        foreign = self.sharding.foreign(slots, now_s)
        own = [slot for slot in slots if slot not in foreign] if foreign else slots
        self.tiers.committed(own)
        self._readable(slots, now_s, out)
        return foreign

    def _readable(self, slots: list[int], now_s: float, out: list[Action]) -> None:
        """These pages can be read from now on: a client wrote them, or they came up from a tier."""
        namespace_of = self.store.facts.namespace
        for slot in slots if self.waits.open else ():
            self._found(namespace_of[slot], self.store.key_of(slot), now_s, out)
        self.sharding.filled(slots, now_s)
        self.sharding.fetches.written(slots, now_s, out)

    def _found(self, namespace: int, key: bytes, now_s: float, out: list[Action]) -> None:
        self.waits.committed(namespace, key, self.sessions, now_s, out)

    def _pin(self, session: Session, slot: int, request: m.Get, now_s: float, out: list[Action]) -> m.Pin:
        pin = self.reads.hit(session, slot, request, now_s, out)
        self._due.expect(session)
        return pin

    def _discard(self, session: Session, request: m.Discard, out: list[Action]) -> None:
        if not request.sequences:
            self._remove(session, request, out)
            return
        sequence_of, corrupt = self.store.facts.sequence, {}
        for key, sequence in zip(request.keys, request.sequences, strict=False):
            slot = self.store.find(request.namespace, key)
            if slot != NONE and sequence_of[slot] == sequence:
                corrupt[slot] = key
        self.store.drop(list(corrupt), out)
        self.tiers.forget(request.namespace, list(corrupt.values()), out)
        self.discarded += len(corrupt)
        out.append(Answer(session.connection, m.Done(request.id, len(corrupt))))

    def _remove(self, session: Session, request: m.Discard, out: list[Action]) -> None:
        """Drop pages that nobody wants any more, from memory and from tiers."""
        namespace, find, has = request.namespace, self.store.find, self.tiers.has
        there = [key for key in set(request.keys) if find(namespace, key) != NONE or has(namespace, key)]
        self.store.drop([slot for key in there if (slot := find(namespace, key)) != NONE], out)
        self.tiers.forget(namespace, there, out)
        out.append(Answer(session.connection, m.Done(request.id, len(there))))

    def _erase(self, session: Session, request: m.Erase, now_s: float, out: list[Action]) -> None:
        """Drop pages as `_remove` does, and those that are being written, and leave no byte of them."""
        number, keys, key_of = request.namespace, set(request.keys), self.store.facts.key
        found = [slot for slot in self.store.slots_of(number).tolist() if key_of[slot] in keys]
        self.store.wipe_when_free(np.array(found, np.int64))
        for other in self.sessions.values():
            self.writes.end(other, found, out)
        self.sharding.fetches.void(found, now_s, out)
        there = {key for key in keys if self.tiers.has(number, key)}
        self.tiers.erase(number, sorted(keys), self._erasures.begin(has_tiers=self.tiers.any), out)
        there |= {self.store.key_of(slot) for slot in found if self.store.state(slot) == COMMITTED}
        self.store.drop([slot for slot in found if self.store.state(slot) == COMMITTED], out)
        if request.away is not None:
            self.administration.void_at(number, request.away, out)
        done, voids = m.Done(request.id, len(there)), bool(request.away)
        self._erasures.answer(session.connection, done, now_s, out, voids=voids)

    # --- for people who look

    def _list_pages(self, session: Session, request: ListPages) -> m.Reply:
        namespace = self.namespaces.find(request.name)
        if namespace is None:
            text = f"node {self.name} has no namespace '{request.name}'"
            return m.Fault(request.id, "unknown_namespace", text)
        asked = namespace.number, request.cursor, request.limit, session.connection
        return PageList(request.id, *self._listing.answer(*asked))

    def list_pages(self, namespace: int, cursor: int, limit: int) -> tuple[list[PageEntry], int]:
        """For the node itself: as `ListPages`."""
        return self._listing.answer(namespace, cursor, limit, LOCAL)

    def status(self, request_id: int, now_s: float, session: Session | None = None) -> m.StatusReport:
        """The node's status. For a client, without the namespaces that it may not read."""
        return report(self, request_id, now_s, session)

    @property
    def next_deadline_s(self) -> float:
        """When the shell should send a Tick; infinite: it need not."""
        return min(
            self._due.next_deadline_s,
            self.writes.next_quarantine_end_s(),
            self._durable.next_deadline_s,
            self._erasures.next_deadline_s(self.store.now_s),
            self.sharding.next_deadline_s,
            self.store.next_work_s,
            self.kept.next_deadline_s,
            self.tiers.next_deadline_s,
            self._save_at_s,
        )

    def check(self) -> None:
        """Assert that every page and every byte has an owner. Slow: for tests."""
        check(self.store)
        self.waits.check()
        self.tiers.check()
        self.sharding.check()
        reserved = [slot for session in self.sessions.values() for slot in session.reservations]
        reserved += self.tiers.reserved_slots() + self.sharding.fetches.reserved_slots()
        assert sorted(reserved) == self.store.slots_in_state(RESERVED)
        for session in self.sessions.values():
            assert session.due_s <= session.next_deadline_s()
            for get in session.gets.values():
                waited_for = self.tiers.waited_for(get) + self.sharding.fetches.waited_for(get)
                assert get.missing == waited_for > 0
            held = [*session.reservations.values(), *session.quarantined.values()]
            assert session.reserved_bytes == sum(reservation.slot_bytes for reservation in held)
            assert session.reserved_bytes <= self._limits.max_reserved_bytes
