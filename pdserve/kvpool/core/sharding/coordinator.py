"""One node among several: ownership, pages of others that clients of this node read and write, pages that go
to their owners, replicas held here and elsewhere. Pure.

NodeState uses this object alone. While the node is alone it costs nothing: it refuses nothing, and has no
deadline.

A push of another node is a Reserve like any client's, with the bounds of any client. It may be for pages
only that this node owns. Those that no client waits for have more bounds: one request gets
`push_batch_bytes`, and while a tier here cannot keep up nothing; and in one epoch all pushes together take
the free space and DISPLACED_SHARE of the capacity: room for a share of the hottest pages, but not so much
that pushed pages evict each other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from pdserve.kvpool.core.events import (
    Action,
    Answer,
    AskOwners,
    PagesFetched,
    PagesPushed,
    ViewChanged,
    WatchOwners,
)
from pdserve.kvpool.core.pending_gets import PendingGets
from pdserve.kvpool.core.sessions import Limits, Session
from pdserve.kvpool.core.sharding.copies import Copies
from pdserve.kvpool.core.sharding.fetches import Fetches, OnCommit
from pdserve.kvpool.core.sharding.forwards import Forwards
from pdserve.kvpool.core.sharding.handover import Handover
from pdserve.kvpool.core.sharding.ownership import Ownership, TierPages
from pdserve.kvpool.core.sharding.replicas import Replicas
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.core.waits import MAX_WAIT_S
from pdserve.kvpool.protocol.messages import (
    BUSY,
    FULL,
    GRANTED,
    MOVED,
    Exists,
    Grant,
    Present,
    Reserve,
    Reserved,
    Wait,
)

ADVANCE_S: Final = 1.0  # between two looks at copies and at the leases of replicas
DISPLACED_SHARE: Final = 0.5  # of the capacity: pages here that pushed ones may displace, beside free space
_MOVED: Final = Grant(MOVED)
_BUSY: Final = Grant(BUSY)
_FULL: Final = Grant(FULL)
_NONE: Final[dict[bytes, Grant]] = {}


class Sharding:
    """`limits`: `copy_lease_s` of replicas held here and elsewhere, and how fast pages are pushed. `gets`
    wait for pages that are fetched; `on_commit(slots, now_s, out)` is called as these become readable.
    """

    def __init__(
        self,
        name: str,
        store: PageStore,
        limits: Limits,
        tiers: TierPages,
        gets: PendingGets,
        on_commit: OnCommit,
    ) -> None:
        self.ownership = Ownership(name, store, tiers)
        self.copies = Copies(store, limits.copy_lease_s)
        self.replicas = Replicas(
            store, limits.copy_lease_s, lambda keys: self.ownership.ours(keys).tolist(), tiers
        )
        self.handover = Handover(store, tiers, self.replicas, limits.push_bytes_s, limits.push_batch_bytes)
        exchange_bytes = limits.exchange_bytes
        self.fetches = Fetches(store, self.ownership, self.replicas, gets, on_commit, exchange_bytes)
        self.forwards = Forwards(store, self.ownership, exchange_bytes)
        self._store = store
        self._tiers = tiers
        self._push_batch_bytes = limits.push_batch_bytes
        self._room_bytes = 0.0  # that pushes may still take in this epoch
        self._advance_at_s = float("inf")

    @property
    def next_deadline_s(self) -> float:
        return min(
            self._advance_at_s,
            self.ownership.next_step_s,
            self.handover.next_deadline_s,
            self.forwards.next_deadline_s,
        )

    def view_changed(self, event: ViewChanged, now_s: float, out: list[Action]) -> None:
        ring_changed = event.ring.epoch != self.ownership.epoch
        self.ownership.view_changed(event.ring, event.previous, stable=event.stable, now_s=now_s)
        if ring_changed:
            self.copies.view_changed()
            self.replicas.view_changed()
            self.handover.view_changed(event.ring, self.ownership.number, now_s, out)
            self.forwards.view_changed(now_s, out)
            free_bytes = self._store.free_bytes + self._tiers.free_bytes
            self._room_bytes = free_bytes + DISPLACED_SHARE * self._store.slots.capacity_bytes
        if not self.ownership.alone and self._advance_at_s == float("inf"):
            self._advance_at_s = now_s + ADVANCE_S

    def tick(self, now_s: float, out: list[Action]) -> None:
        self.ownership.drop_some(self.replicas, now_s, out)
        self.pump(now_s, out)
        if self.handover.next_deadline_s <= now_s:
            self.handover.pump(now_s, out)
        if self._advance_at_s > now_s:
            return
        self.replicas.expire(now_s, out)
        ring = self.ownership.ring
        if ring is not None:
            self.copies.advance(ring, self.ownership.number, now_s, out)
        self._advance_at_s = now_s + ADVANCE_S
        if self.ownership.alone and not len(self.replicas):
            self._advance_at_s = float("inf")

    def pump(self, now_s: float, out: list[Action]) -> None:
        """Offer owners what clients have written. Called after all other decisions."""
        if self.forwards.next_deadline_s <= now_s:
            self.forwards.pump(now_s, out)

    def configure(self, namespace: int, copies: int) -> None:
        """So many nodes are to hold each page of a namespace; 1: its owner alone."""
        self.copies.configure(namespace, copies)

    # --- pages

    def refusals(self, session: Session, request: Reserve) -> dict[bytes, Grant]:
        """Keys that may not be reserved on this node, and the answer for each."""
        if self.ownership.alone or not request.keys or (request.replica and session.peer):
            return _NONE
        if not session.peer and not self.forwards.is_full:
            return _NONE
        refused, pushed = _NONE, session.peer and not request.written
        if pushed and self._room_bytes <= 0:
            refused = dict.fromkeys(request.keys, _FULL)
        elif pushed:
            pages = max(1, self._push_batch_bytes // sum(request.segment_bytes))
            refused = dict.fromkeys(request.keys[0 if self._tiers.behind else pages :], _BUSY)
        ours = self.ownership.ours(request.keys)
        if not ours.all():
            answer = _MOVED if session.peer else _FULL
            refused = {
                **refused,
                **{k: answer for k, mine in zip(request.keys, ours, strict=True) if not mine},
            }
        return refused

    def reserved(
        self, session: Session, request: Reserve, reserved: Reserved, slot_bytes: int | None, now_s: float
    ) -> None:
        """A Reserve was answered."""
        if not session.peer or not slot_bytes:
            return
        if request.replica:
            self.replicas.reserved(request.namespace, request.keys, reserved.grants, slot_bytes, now_s)
            # even if the node is alone by now
            self._advance_at_s = min(self._advance_at_s, now_s + ADVANCE_S)
        elif not request.written:
            self._room_bytes -= slot_bytes * sum(grant.status == GRANTED for grant in reserved.grants)

    def filled(self, slots: Sequence[int], now_s: float) -> None:
        """New pages are in these slots."""
        self.copies.filled(slots)
        self.handover.committed(slots, now_s)

    def pushed(self, event: PagesPushed, now_s: float, out: list[Action]) -> None:
        """A push of copies, or of other nodes' pages, has ended."""
        if event.push.written:
            self.forwards.pushed(event, now_s, out)
        elif event.push.replica:
            self.copies.pushed(event, now_s)
        else:
            self.handover.pushed(event, now_s, out)

    def fetched(self, event: PagesFetched, now_s: float, out: list[Action]) -> None:
        """Pages have come from another node."""
        self.fetches.ended(event, now_s, out)

    def foreign(self, slots: Sequence[int], now_s: float) -> set[int]:
        """Those of the slots that were just filled with pages of other nodes, which are to take them."""
        foreign = self.forwards.foreign([slot for slot in slots if slot not in self.replicas])
        for slot in foreign:
            self.fetches.spare(slot, now_s)
        return foreign

    # --- questions

    def look_up(self, session: Session, request: Exists, present: Present, out: list[Action]) -> None:
        """Answer a question with what is here, or have other nodes asked about keys of theirs: all that a
        hint or a fate is about, else those that are not here.
        """
        all_of_them = request.keep_s or request.move or request.fates
        asked = [i for i, here in enumerate(present.mask) if all_of_them or not here]
        others = self._others(session, request.keys, asked)
        if others:
            out.append(AskOwners(session.connection, request, present, others))
        else:
            out.append(Answer(session.connection, present))

    def watch(self, session: Session, request: Wait, missing: Collection[bytes], out: list[Action]) -> None:
        """A wait has begun for these keys: have other nodes say when they have those of theirs."""
        asked = [i for i, key in enumerate(request.keys) if key in missing] if missing else []
        others = self._others(session, request.keys, asked)
        if others:
            keys = {node: [request.keys[i] for i in indices] for node, indices in others.items()}
            out.append(WatchOwners(request.namespace, min(request.timeout_s, MAX_WAIT_S), keys))

    def _others(
        self, session: Session, keys: Sequence[bytes], indices: Sequence[int]
    ) -> dict[str, list[int]]:
        """By other node, those of the indices whose keys it owns, or owned before while pages move. For other
        nodes nobody is asked.
        """
        if session.peer or not indices or not self.ownership.has_others:
            return {}
        found: dict[str, list[int]] = {}
        for index, nodes in zip(indices, self.ownership.sources([keys[i] for i in indices]), strict=True):
            for node in nodes:
                found.setdefault(node, []).append(index)
        return found

    # --- looking

    def check(self) -> None:
        """Assert the invariants. Slow: for tests."""
        self.replicas.check()
        self.fetches.check()
        self.forwards.check()

    def counters(self) -> dict[str, int]:
        handover = self.handover
        return {
            **self.fetches.counters(),
            **self.forwards.counters(),
            "foreign_dropped": self.ownership.foreign_dropped,
            "replicas": len(self.replicas),
            "replica_bytes": self.replicas.slot_bytes,
            "replicas_expired": self.replicas.expired,
            "replica_pages_pushed": self.copies.pages_pushed,
            "pages_pushed": handover.pages_pushed,
            "bytes_pushed": handover.bytes_pushed,
            "pushes_failed": handover.pushes_failed,
            "peers_given_up": handover.peers_given_up,
            "pages_to_move": handover.pages_to_move,
            "moving": int(handover.moving),
            "settled_epoch": handover.settled,
        }
