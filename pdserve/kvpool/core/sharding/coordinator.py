"""One node among several: ownership, the replicas it holds, the replicas it asks for. Pure.

NodeState uses this object alone. While the node is alone it costs nothing: it refuses nothing, and has no
deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pdserve.kvpool.core.events import Action, ReplicasMade, ViewChanged
from pdserve.kvpool.core.sessions import Session
from pdserve.kvpool.core.sharding.copies import Copies
from pdserve.kvpool.core.sharding.ownership import Ownership, TierPages
from pdserve.kvpool.core.sharding.replicas import Replicas
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.protocol.cluster_messages import ListOwned, Owned
from pdserve.kvpool.protocol.messages import MOVED, Fault, Grant, Reserve, Reserved

ADVANCE_S: Final = 1.0  # between two looks at copies and at the leases of replicas
_MOVED: Final = Grant(MOVED)
_NONE: Final[dict[bytes, Grant]] = {}


class Sharding:
    """`copy_lease_s`: of a replica, in s."""

    def __init__(self, name: str, store: PageStore, copy_lease_s: float, tiers: TierPages) -> None:
        self.ownership = Ownership(name, store, tiers)
        self.copies = Copies(store, copy_lease_s)
        self.replicas = Replicas(store, copy_lease_s, lambda keys: self.ownership.ours(keys).tolist(), tiers)
        self.moved_answers = 0
        self._advance_at_s = float("inf")

    @property
    def next_deadline_s(self) -> float:
        return min(self._advance_at_s, self.ownership.next_step_s)

    def view_changed(self, event: ViewChanged, now_s: float) -> None:
        ring_changed = event.ring.epoch != self.ownership.epoch
        self.ownership.view_changed(event.ring, stable=event.stable, now_s=now_s)
        if ring_changed:
            self.copies.view_changed()
            self.replicas.view_changed()
        if not self.ownership.alone and self._advance_at_s == float("inf"):
            self._advance_at_s = now_s + ADVANCE_S

    def tick(self, now_s: float, out: list[Action]) -> None:
        self.ownership.drop_some(self.replicas, now_s, out)
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
        if self.ownership.alone or session.peer or not request.keys:
            return _NONE
        ours = self.ownership.ours(request.keys)
        if ours.all():
            return _NONE
        refused = {key: _MOVED for key, mine in zip(request.keys, ours.tolist(), strict=True) if not mine}
        self.moved_answers += len(refused)
        return refused

    def reserved(
        self, session: Session, request: Reserve, reserved: Reserved, slot_bytes: int | None, now_s: float
    ) -> None:
        """A Reserve was answered."""
        if request.replica and session.peer and slot_bytes:
            self.replicas.reserved(request.namespace, request.keys, reserved.grants, slot_bytes, now_s)
            # even if the node is alone by now
            self._advance_at_s = min(self._advance_at_s, now_s + ADVANCE_S)

    def filled(self, slots: Sequence[int]) -> None:
        """New pages are in these slots."""
        for slot in slots:
            self.copies.filled(slot)

    # --- requests of other nodes

    def list_owned(self, request: ListOwned) -> Owned | Fault:
        return self.ownership.list_owned(request)

    def replicas_made(self, event: ReplicasMade, now_s: float) -> None:
        self.copies.made(event, now_s)

    # --- looking

    def counters(self) -> dict[str, int]:
        return {
            "moved_answers": self.moved_answers,
            "foreign_dropped": self.ownership.foreign_dropped,
            "replicas": len(self.replicas),
            "replica_bytes": self.replicas.slot_bytes,
            "replicas_expired": self.replicas.expired,
        }
