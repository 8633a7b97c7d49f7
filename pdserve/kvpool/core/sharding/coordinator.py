"""One node among several: ownership, pages that go to their owners, replicas held here and elsewhere. Pure.

NodeState uses this object alone. While the node is alone it costs nothing: it refuses nothing, and has no
deadline.

A push of another node is a Reserve like any client's, with the bounds of any client. Beside these it may be
for pages only that this node owns; one request gets `push_batch_bytes`, and while a tier here cannot keep up
nothing; and in one epoch all pushes together take the free space and DISPLACED_SHARE of the capacity: room
for a share of the hottest pages, but not so much that pushed pages evict each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pdserve.kvpool.core.events import Action, PagesPushed, ViewChanged
from pdserve.kvpool.core.sessions import Limits, Session
from pdserve.kvpool.core.sharding.copies import Copies
from pdserve.kvpool.core.sharding.handover import Handover
from pdserve.kvpool.core.sharding.ownership import Ownership, TierPages
from pdserve.kvpool.core.sharding.replicas import Replicas
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.protocol.messages import BUSY, FULL, GRANTED, MOVED, Grant, Reserve, Reserved

ADVANCE_S: Final = 1.0  # between two looks at copies and at the leases of replicas
DISPLACED_SHARE: Final = 0.5  # of the capacity: pages here that pushed ones may displace, beside free space
_MOVED: Final = Grant(MOVED)
_BUSY: Final = Grant(BUSY)
_FULL: Final = Grant(FULL)
_NONE: Final[dict[bytes, Grant]] = {}


class Sharding:
    """`limits`: `copy_lease_s` of replicas held here and elsewhere, and how fast pages are pushed."""

    def __init__(self, name: str, store: PageStore, limits: Limits, tiers: TierPages) -> None:
        self.ownership = Ownership(name, store, tiers)
        self.copies = Copies(store, limits.copy_lease_s)
        self.replicas = Replicas(
            store, limits.copy_lease_s, lambda keys: self.ownership.ours(keys).tolist(), tiers
        )
        self.handover = Handover(store, tiers, self.replicas, limits.push_bytes_s, limits.push_batch_bytes)
        self.moved_answers = 0
        self._store = store
        self._tiers = tiers
        self._push_batch_bytes = limits.push_batch_bytes
        self._room_bytes = 0.0  # that pushes may still take in this epoch
        self._advance_at_s = float("inf")

    @property
    def next_deadline_s(self) -> float:
        return min(self._advance_at_s, self.ownership.next_step_s, self.handover.next_deadline_s)

    def view_changed(self, event: ViewChanged, now_s: float, out: list[Action]) -> None:
        ring_changed = event.ring.epoch != self.ownership.epoch
        self.ownership.view_changed(event.ring, stable=event.stable, now_s=now_s)
        if ring_changed:
            self.copies.view_changed()
            self.replicas.view_changed()
            self.handover.view_changed(event.ring, self.ownership.number, now_s, out)
            free_bytes = self._store.free_bytes + self._tiers.free_bytes
            self._room_bytes = free_bytes + DISPLACED_SHARE * self._store.slots.capacity_bytes
        if not self.ownership.alone and self._advance_at_s == float("inf"):
            self._advance_at_s = now_s + ADVANCE_S

    def tick(self, now_s: float, out: list[Action]) -> None:
        self.ownership.drop_some(self.replicas, now_s, out)
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

    def configure(self, namespace: int, copies: int) -> None:
        """So many nodes are to hold each page of a namespace; 1: its owner alone."""
        self.copies.configure(namespace, copies)

    # --- pages

    def refusals(self, session: Session, request: Reserve) -> dict[bytes, Grant]:
        """Keys that may not be reserved on this node, and the answer for each."""
        if self.ownership.alone or not request.keys or (request.replica and session.peer):
            return _NONE
        refused = _NONE
        if session.peer and self._room_bytes <= 0:
            refused = dict.fromkeys(request.keys, _FULL)
        elif session.peer:
            pages = max(1, self._push_batch_bytes // sum(request.segment_bytes))
            refused = dict.fromkeys(request.keys[0 if self._tiers.behind else pages :], _BUSY)
        ours = self.ownership.ours(request.keys)
        if not ours.all():
            moved = {key: _MOVED for key, mine in zip(request.keys, ours.tolist(), strict=True) if not mine}
            self.moved_answers += 0 if session.peer else len(moved)
            refused = {**refused, **moved}
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
        else:
            self._room_bytes -= slot_bytes * sum(grant.status == GRANTED for grant in reserved.grants)

    def filled(self, slots: Sequence[int], now_s: float) -> None:
        """New pages are in these slots."""
        self.copies.filled(slots)
        self.handover.committed(slots, now_s)

    def pushed(self, event: PagesPushed, now_s: float, out: list[Action]) -> None:
        """A push of copies, or of other nodes' pages, has ended."""
        if event.push.replica:
            self.copies.pushed(event, now_s)
        else:
            self.handover.pushed(event, now_s, out)

    # --- looking

    def counters(self) -> dict[str, int]:
        handover = self.handover
        return {
            "moved_answers": self.moved_answers,
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
