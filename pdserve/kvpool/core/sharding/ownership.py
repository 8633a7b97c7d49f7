"""Which pages are this node's under the newest view, and what becomes of those that are not. Pure.

    view changed, pages moving      foreign pages stay: their new owners pull them, readers may fall back here
    view stable                     foreign pages are dropped, some at a time; replicas and pinned ones stay

`list_owned` answers a new owner. It reads the slots in order from its cursor, in vectorised steps, and looks
at `MAX_LOOKED_AT` keys per call at most, so a call costs a few milliseconds whatever the size of the arena.
A page that is committed into a slot behind the cursor comes from a reservation that was open when the listing
began, or after it under the new view, and then it is the node's own: see migration.py.

Pages in the tiers follow after the slots, in the order of a list of their keys that is made when
that part begins: cursors from `slots` on are places in it. What is in memory by then is left out only if it
was there when the asker began: a page that sinks or rises meanwhile is listed once or twice. Each new owner
has a list of its own, and one only, since it goes through one namespace at a time; who comes with a place in
a list that is not there is told to begin again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from pdserve.kvpool.cluster.ring import Ring, positions_of
from pdserve.kvpool.core.events import Action
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.protocol.cluster_messages import ListOwned, Owned
from pdserve.kvpool.protocol.messages import Fault

MAX_LOOKED_AT: Final = 8192  # slots whose keys are looked at in one step
MAX_DROPPED: Final = 1024  # pages dropped in one step
STEP_S: Final = 0.005  # between steps: others get their turn
AGAIN_S: Final = 1.0  # until pinned pages are looked at again
MAX_KEY_LISTS: Final = 8  # of keys in tiers, kept for people who look


class TierPages(Protocol):
    """The pages that the tiers hold, as far as ownership is concerned."""

    @property
    def ready(self) -> bool:
        """Whether all that the tiers hold is known by now."""
        ...

    def namespaces(self) -> list[int]:
        """Those that have pages there."""
        ...

    def keys(self, namespace: int) -> list[bytes]:
        """Of all pages there, in a list of the caller's own."""
        ...

    def length(self, namespace: int, key: bytes) -> int:
        """Of a page there; 0 when there is none."""
        ...

    def forget(self, namespace: int, keys: Sequence[bytes], out: list[Action]) -> None:
        """Drop pages from all tiers."""
        ...


class NoTiers:
    """A node without tiers. Implements TierPages."""

    ready = True

    def namespaces(self) -> list[int]:
        return []

    def keys(self, namespace: int) -> list[bytes]:
        return []

    def length(self, namespace: int, key: bytes) -> int:
        return 0

    def forget(self, namespace: int, keys: Sequence[bytes], out: list[Action]) -> None:
        return


class Ownership:
    """`ring` None: there is no view, everything is this node's."""

    def __init__(self, name: str, store: PageStore, tiers: TierPages) -> None:
        self.ring: Ring | None = None
        self.number = -1  # ours in the ring; -1: we own nothing
        self.stable = True
        self.foreign_dropped = 0
        self.next_step_s = float("inf")
        self._name = name
        self._store = store
        self._tiers = tiers
        self._cursor = 0
        self._skipped = False
        self._in_slots = True  # where dropping is: in the slots, then in the tiers
        self._to_drop_from_tiers: list[tuple[int, list[bytes]]] = []
        self._lists: dict[str, tuple[int, list[bytes]]] = {}  # by new owner: namespace, keys in tiers
        self._begun: dict[str, int] = {}  # by new owner: the next sequence when it began
        self._looked_through: OrderedDict[tuple[int, str], list[bytes]] = OrderedDict()

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
        self._lists.clear()
        self._begun.clear()
        self._begin_dropping(now_s if stable and not self.alone else float("inf"))

    def tiers_ready(self, now_s: float) -> None:
        """The tiers have told all that they hold: there may be foreign pages among it."""
        if self.stable and not self.alone:
            self._begin_dropping(now_s)

    def _begin_dropping(self, at_s: float) -> None:
        self.next_step_s = at_s
        self._cursor, self._skipped, self._in_slots = 0, False, True
        self._to_drop_from_tiers.clear()

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
        if request.cursor >= self._store.slots.slots:
            return self._list_tiers(request, ring, number)
        writing = 0
        if request.cursor == 0:
            self._begun[request.node] = self._store.next_sequence
            writing = int(not self._tiers.ready)  # what a tier has yet to tell is asked for again, too
            keys = list(self._store.index.namespace(request.namespace).writing)
            if keys:
                writing += int(np.count_nonzero(ring.owners_at(positions_of(keys)) == number))
        slots = self._store.committed_slots(request.cursor, MAX_LOOKED_AT, request.namespace)
        theirs = slots[ring.owners_at(self._positions(slots)) == number]
        found = theirs[: request.limit].tolist()
        cursor = self._store.slots.slots
        if len(theirs) > request.limit:
            cursor = found[-1] + 1
        elif len(slots) == MAX_LOOKED_AT:
            cursor = int(slots[-1]) + 1
        if cursor >= self._store.slots.slots:
            every = self._tiers.keys(request.namespace)
            if every:
                self._lists[request.node] = request.namespace, every
            else:
                cursor = 0
        facts = self._store.facts
        lengths = [facts.length_bytes[slot] for slot in found]
        return Owned(request.id, [facts.key[slot] or b"" for slot in found], lengths, cursor, writing)

    def _list_tiers(self, request: ListOwned, ring: Ring, number: int) -> Owned:
        """The part of the answers that concerns the tiers."""
        start = request.cursor - self._store.slots.slots
        namespace, every = self._lists.get(request.node, (request.namespace, []))
        if namespace != request.namespace or not every:  # the answer before was lost, say
            return Owned(request.id, [], [], 0, 1)
        keys = every[start : start + MAX_LOOKED_AT]
        found: list[bytes] = []
        lengths: list[int] = []
        cursor = request.cursor + len(keys)
        theirs = np.flatnonzero(ring.owners_at(positions_of(keys)) == number).tolist() if keys else []
        committed = self._store.index.namespace(request.namespace).committed
        begun, facts = self._begun.get(request.node, 0), self._store.facts
        for place in theirs:
            if len(found) == request.limit:
                cursor = request.cursor + place
                break
            slot = committed.get(keys[place])
            if slot is None:
                length = self._tiers.length(request.namespace, keys[place])
            else:  # one that rose meanwhile may be in a slot that was passed already
                length = facts.length_bytes[slot] if facts.sequence[slot] >= begun else 0
            if length:
                found.append(keys[place])
                lengths.append(length)
        if cursor - self._store.slots.slots >= len(every):
            cursor = 0
            del self._lists[request.node]
        return Owned(request.id, found, lengths, cursor, 0)

    def tier_keys(self, namespace: int, asker: str, *, at: int) -> list[bytes]:
        """The list that a client looks through; made anew when it begins, or was forgotten."""
        name = (namespace, asker)
        known = self._looked_through.pop(name, None)
        if known is None or at == 0:
            known = self._tiers.keys(namespace)
        if known:
            self._looked_through[name] = known
            while len(self._looked_through) > MAX_KEY_LISTS:
                self._looked_through.popitem(last=False)
        return known

    def drop_some(self, replicas: Container[int], now_s: float, out: list[Action]) -> None:
        """One step of dropping what is neither ours nor a replica."""
        if self.next_step_s > now_s or self.ring is None:
            return
        self.next_step_s = now_s + STEP_S
        if self._in_slots:
            self._in_slots = not self._drop_slots(replicas, out)
            if not self._in_slots:
                self._to_drop_from_tiers = [(n, self._tiers.keys(n)) for n in self._tiers.namespaces()]
        elif self._to_drop_from_tiers:
            self._drop_from_tiers(out)
        if not self._in_slots and not self._to_drop_from_tiers:
            # pages that were pinned, or written for who did not know the view yet, go in the next round
            again = self._skipped or self._writes_foreign()
            self._begin_dropping(now_s + AGAIN_S if again else float("inf"))

    def _drop_slots(self, replicas: Container[int], out: list[Action]) -> bool:
        """One step through the slots; whether it was the last."""
        store = self._store
        slots = store.committed_slots(self._cursor, MAX_LOOKED_AT)
        at_end = len(slots) < MAX_LOOKED_AT
        foreign = slots[~self._ours_at(slots)].tolist()
        if len(foreign) > MAX_DROPPED:
            foreign, at_end = foreign[:MAX_DROPPED], False
            self._cursor = foreign[-1] + 1
        elif not at_end:
            self._cursor = int(slots[-1]) + 1
        foreign = [slot for slot in foreign if slot not in replicas]
        free = [slot for slot in foreign if not store.holds(slot)]
        self._skipped = self._skipped or len(free) < len(foreign)
        store.drop(free, out)
        self.foreign_dropped += len(free)
        return at_end

    def _drop_from_tiers(self, out: list[Action]) -> None:
        """One step through the tiers."""
        namespace, keys = self._to_drop_from_tiers[-1]
        some = keys[-MAX_LOOKED_AT:]
        del keys[-MAX_LOOKED_AT:]
        if not keys:
            self._to_drop_from_tiers.pop()
        if some:
            ours = self.ours(some).tolist()
            committed = self._store.index.namespace(namespace).committed
            # what is still in memory is pinned there, or a replica: its copy in a tier goes when it does
            foreign = [k for k, mine in zip(some, ours, strict=True) if not mine and k not in committed]
            self._tiers.forget(namespace, foreign, out)
            self.foreign_dropped += len(foreign)

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
