"""One node among several: ownership, the replicas it holds, the replicas it asks for. Pure.

NodeState uses this object alone. While the node is alone it costs nothing: it keeps no heat, refuses nothing,
has no deadline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pdserve.kvpool.core.events import Action, ReplicasMade, ViewChanged
from pdserve.kvpool.core.sessions import ReplicationLimits, Session
from pdserve.kvpool.core.sharding.heat import Heat
from pdserve.kvpool.core.sharding.held_replicas import Replicas
from pdserve.kvpool.core.sharding.hot_pages import Replication
from pdserve.kvpool.core.sharding.ownership import Ownership
from pdserve.kvpool.core.sharding.tier_pages import NoTiers, TierPages
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.protocol.cluster_messages import EndReplicas, ListOwned, Owned
from pdserve.kvpool.protocol.messages import MOVED, Done, Fault, Grant, Reserve, Reserved

ADVANCE_S: Final = 1.0  # between two looks at heat and at the leases of replicas
_MOVED: Final = Grant(MOVED)
_NONE: Final[dict[bytes, Grant]] = {}


class Sharding:
    """`heat` is None while the node is alone."""

    def __init__(
        self, name: str, store: PageStore, limits: ReplicationLimits, pages: TierPages | None = None
    ) -> None:
        self.heat: Heat | None = None
        tiers = pages or NoTiers()
        self.ownership = Ownership(name, store, tiers)
        self.replication = Replication(store, limits)
        max_bytes = int(store.slots.capacity_bytes * limits.max_share)
        self.replicas = Replicas(
            store, max_bytes, limits.lease_s, lambda keys: self.ownership.ours(keys).tolist(), tiers
        )
        self.moved_answers = 0
        self._store = store
        self._limits = limits
        self._advance_at_s = float("inf")

    @property
    def next_deadline_s(self) -> float:
        return min(self._advance_at_s, self.ownership.next_step_s)

    def view_changed(self, event: ViewChanged, now_s: float) -> None:
        ring_changed = event.ring.epoch != self.ownership.epoch
        self.ownership.view_changed(event.ring, stable=event.stable, now_s=now_s)
        if ring_changed:
            self.replication.view_changed()
            self.replicas.view_changed()
        if not self.ownership.alone and self._advance_at_s == float("inf"):
            self._advance_at_s = now_s + ADVANCE_S
            if self._limits.max_replicas and self.heat is None:
                limits = self._limits
                slots = self._store.slots.slots
                self.heat = Heat(slots, limits.half_life_s, limits.hot_reads_s, now_s)

    def tick(self, now_s: float, out: list[Action]) -> None:
        self.ownership.drop_some(self.replicas, now_s, out)
        if self._advance_at_s > now_s:
            return
        self.replicas.expire(now_s, out)
        ring = self.ownership.ring
        if ring is not None:
            self.replication.advance(self.heat, ring, self.ownership.number, now_s, out)
        self._advance_at_s = now_s + ADVANCE_S
        if self.ownership.alone and not len(self.replicas):
            self._advance_at_s = float("inf")
            self.heat = None

    def configure(self, namespace: int, copies: int) -> None:
        """So many nodes are to hold each page of a namespace; 1: its owner alone."""
        self.replication.configure(namespace, copies)

    # --- pages

    @property
    def replica_counts(self) -> Mapping[int, int]:
        """For slots of hot pages, how many nodes after this one on the ring hold the page too."""
        return self.replication.counts

    def read(self, slots: Sequence[int]) -> None:
        """Clients read these pages."""
        heat = self.heat
        if heat is not None:
            for slot in slots:
                heat.read(slot)

    def refusals(self, session: Session, request: Reserve, slot_bytes: int | None) -> dict[bytes, Grant]:
        """Keys that may not be reserved on this node, and the answer for each."""
        if request.replica and session.peer:
            is_hot = request.namespace not in self.replication.copies
            if not slot_bytes or not is_hot:
                return _NONE
            return self.replicas.refusals(request.namespace, request.keys, slot_bytes)
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
            is_hot = request.namespace not in self.replication.copies
            self.replicas.reserved(
                request.namespace, request.keys, reserved.grants, slot_bytes, now_s, is_hot=is_hot
            )
            # even if the node is alone by now
            self._advance_at_s = min(self._advance_at_s, now_s + ADVANCE_S)

    def filled(self, slots: Sequence[int]) -> None:
        """New pages are in these slots."""
        for slot in slots:
            if self.heat is not None:
                self.heat.filled(slot)
            self.replication.filled(slot)

    # --- requests of other nodes

    def list_owned(self, request: ListOwned) -> Owned | Fault:
        return self.ownership.list_owned(request)

    def end_replicas(self, request: EndReplicas, out: list[Action]) -> Done:
        return Done(request.id, self.replicas.end(request.namespace, request.keys, out))

    def replicas_made(self, event: ReplicasMade, now_s: float) -> None:
        self.replication.made(event, now_s)

    # --- looking

    def counters(self) -> dict[str, int]:
        return {
            "moved_answers": self.moved_answers,
            "foreign_dropped": self.ownership.foreign_dropped,
            "replicas": len(self.replicas),
            "replica_bytes": self.replicas.slot_bytes,
            "replicas_expired": self.replicas.expired,
            "hot_pages": len(self.replication.hot_keys()),
        }

    def hot_keys(self) -> Sequence[bytes]:
        """Keys of pages that have replicas on other nodes, or soon will."""
        return self.replication.hot_keys()
