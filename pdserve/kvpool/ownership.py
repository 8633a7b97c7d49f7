"""Which pages are this node's under the newest view, and what becomes of those that are not. Pure.

    view changed, pages moving      foreign pages stay: their new owners pull them, readers may fall back here
    view stable                     foreign pages are dropped, some at a time; replicas and pinned ones stay

`list_owned` answers a new owner. It reads the slots in order from its cursor, in vectorised steps, and looks
at `MAX_LOOKED_AT` keys per call at most, so a call costs a few milliseconds whatever the size of the arena.
A page that is committed into a slot behind the cursor comes from a reservation that was open when the listing
began, or after it under the new view, and then it is the node's own: see migration.py.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from pdserve.kvpool.cluster_messages import ListOwned, Owned
from pdserve.kvpool.events import Action
from pdserve.kvpool.messages import Fault
from pdserve.kvpool.ring import Ring, positions_of
from pdserve.kvpool.store import PageStore

MAX_LOOKED_AT: Final = 8192  # slots whose keys are looked at in one step
MAX_DROPPED: Final = 1024  # pages dropped in one step
STEP_S: Final = 0.005  # between steps: others get their turn
AGAIN_S: Final = 1.0  # until pinned pages are looked at again


class Ownership:
    """`ring` None: there is no view, everything is this node's."""

    def __init__(self, name: str, store: PageStore) -> None:
        self.ring: Ring | None = None
        self.number = -1  # ours in the ring; -1: we own nothing
        self.stable = True
        self.foreign_dropped = 0
        self.next_step_s = float("inf")
        self._name = name
        self._store = store
        self._cursor = 0
        self._skipped = False

    @property
    def epoch(self) -> int:
        return 0 if self.ring is None else self.ring.epoch

    @property
    def alone(self) -> bool:
        """Whether every page is ours."""
        return self.ring is None or (len(self.ring.nodes) == 1 and self.number == 0)

    def view_changed(self, ring: Ring, *, stable: bool, now_s: float) -> None:
        self.ring, self.stable = ring, stable
        self.number = ring.number(self._name)
        self._cursor, self._skipped = 0, False
        self.next_step_s = now_s if stable and not self.alone else float("inf")

    def ours(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Which of the keys are ours, shape [len(keys)]."""
        if self.alone:
            return np.ones(len(keys), bool)
        if self.ring is None or not self.ring.nodes:
            return np.zeros(len(keys), bool)
        return np.equal(self.ring.owners_at(positions_of(keys)), self.number)

    def list_owned(self, request: ListOwned) -> Owned | Fault:
        """The answer to a new owner."""
        ring = self.ring
        if ring is None or ring.epoch != request.epoch:
            message = f"node {self._name} knows epoch {self.epoch}, not {request.epoch}: ask again"
            return Fault(request.id, "stale_view", message)
        number = ring.number(request.node)
        if number < 0:
            return Owned(request.id, [], [], 0, 0)
        writing = 0
        if request.cursor == 0:
            keys = list(self._store.index.namespace(request.namespace).writing)
            writing = int(np.count_nonzero(ring.owners_at(positions_of(keys)) == number)) if keys else 0
        slots = self._store.committed_slots(request.cursor, MAX_LOOKED_AT, request.namespace)
        theirs = slots[ring.owners_at(self._positions(slots)) == number]
        found = theirs[: request.limit].tolist()
        cursor = 0
        if len(theirs) > request.limit:
            cursor = found[-1] + 1
        elif len(slots) == MAX_LOOKED_AT:
            cursor = int(slots[-1]) + 1
        facts = self._store.facts
        lengths = [facts.length_bytes[slot] for slot in found]
        return Owned(request.id, [facts.key[slot] or b"" for slot in found], lengths, cursor, writing)

    def drop_some(self, replicas: Container[int], now_s: float, out: list[Action]) -> None:
        """One step of dropping what is neither ours nor a replica."""
        if self.next_step_s > now_s or self.ring is None:
            return
        store = self._store
        slots = store.committed_slots(self._cursor, MAX_LOOKED_AT)
        at_end = len(slots) < MAX_LOOKED_AT
        foreign = slots[~self._ours_at(slots)].tolist()
        if len(foreign) > MAX_DROPPED:
            foreign, at_end = foreign[:MAX_DROPPED], False
            self._cursor = foreign[-1] + 1
        elif not at_end:
            self._cursor = int(slots[-1]) + 1
        for slot in foreign:
            if slot in replicas:
                continue
            if store.holds(slot):
                self._skipped = True
                continue
            store.drop(slot, out)
            self.foreign_dropped += 1
        self.next_step_s = now_s + STEP_S
        if at_end:
            # pages that were pinned, or written for who did not know the view yet, go in the next round
            self.next_step_s = now_s + AGAIN_S if self._skipped or self._writes_foreign() else float("inf")
            self._cursor, self._skipped = 0, False

    def _writes_foreign(self) -> bool:
        keys = [key for pages in self._store.index for key in pages.writing]
        return bool(keys) and not self.ours(keys).all()

    def _ours_at(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        assert self.ring is not None
        if not self.ring.nodes:
            return np.zeros(len(slots), bool)
        return np.equal(self.ring.owners_at(self._positions(slots)), self.number)

    def _positions(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        key_of = self._store.facts.key
        return positions_of([key_of[slot] or b"" for slot in slots.tolist()])
