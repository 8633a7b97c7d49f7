"""The pages that this node owns under the newest view, and the removal of foreign pages. Pure.

view changed, pages moving    foreign pages stay: they are pushed to their owners (handover.py), and readers
                              may still read them
view stable                   foreign pages are dropped in steps; replicas and pinned pages stay
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from pdserve.kvpool.cluster.ring import Ring, positions_of
from pdserve.kvpool.core.events import Action
from pdserve.kvpool.core.store.page_store import PageStore

MAX_LOOKED_AT: Final = 2048  # keys
MAX_DROPPED: Final = 256  # pages dropped in one step
STEP_S: Final = 0.002  # between steps: requests are served meanwhile
AGAIN_S: Final = 1.0  # pause before pinned pages are tried again


class TierPages(Protocol):
    """The pages in all tiers of the node."""

    @property
    def ready(self) -> bool:
        """Whether the tiers have reported all pages that survived a restart."""
        ...

    @property
    def behind(self) -> bool:
        """Whether the tiers are slower than the writers at present."""
        ...

    @property
    def free_bytes(self) -> int:
        """Bytes that the tiers can take without dropping a page."""
        ...

    def namespaces(self) -> list[int]:
        """The namespaces that have pages in a tier."""
        ...

    def own_keys(self, namespace: int) -> list[bytes]:
        """The keys of all pages in tiers that are this node's alone, in a new list."""
        ...

    def length(self, namespace: int, key: bytes) -> int:
        """The length of a page in a tier, in bytes; 0 when there is none."""
        ...

    def disown(self, namespace: int, keys: Sequence[bytes], out: list[Action]) -> None:
        """Drop pages from these tiers. In a shared tier they stay: other nodes have them too."""
        ...


class Ownership:
    """`ring` is None before the first view: then every page is this node's."""

    def __init__(self, name: str, store: PageStore, tiers: TierPages) -> None:
        self.ring: Ring | None = None
        self.previous: Ring | None = None  # while pages move
        self.views = 0  # that were told
        self.number = -1  # of this node in the ring; -1: it owns nothing
        self.stable = True
        self.foreign_dropped = 0
        self.next_step_s = float("inf")
        self.name = name
        self._store = store
        self._tiers = tiers
        self._cursor = 0
        self._skipped = False
        self._in_slots = True  # where dropping is: in the slots, then in the tiers
        self._to_drop_from_tiers: list[tuple[int, list[bytes]]] = []

    @property
    def epoch(self) -> int:
        return 0 if self.ring is None else self.ring.epoch

    @property
    def alone(self) -> bool:
        """Whether every page is this node's."""
        return self.ring is None or (len(self.ring.nodes) == 1 and self.number == 0)

    def view_changed(self, ring: Ring, previous: Ring | None, *, stable: bool, now_s: float) -> None:
        self.ring, self.previous, self.stable = ring, previous, stable
        self.views += 1
        self.number = ring.number(self.name)
        self._begin_dropping(now_s if stable and not self.alone else float("inf"))

    def tiers_ready(self, now_s: float) -> None:
        """The tiers have reported all their pages: some may be foreign."""
        if self.stable and not self.alone:
            self._begin_dropping(now_s)

    def _begin_dropping(self, at_s: float) -> None:
        self.next_step_s = at_s
        self._cursor, self._skipped, self._in_slots = 0, False, True
        self._to_drop_from_tiers.clear()

    def ours(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Which of the keys are this node's, shape [len(keys)]."""
        if self.alone:
            return np.ones(len(keys), bool)
        if self.ring is None or not self.ring.nodes:
            return np.zeros(len(keys), bool)
        return np.equal(self.ring.owners_at(positions_of(keys)), self.number)

    def sources(self, keys: Sequence[bytes]) -> list[list[str]]:
        """For each key the other nodes that may have its page, the likeliest first: its owner, and while
        pages move its owner before.
        """
        found: list[list[str]] = [[] for _ in keys]
        for ring in (self.ring, self.previous):
            if ring is None or not ring.nodes or not keys:
                continue
            names = [node.node for node in ring.nodes]
            for nodes, owner in zip(found, ring.owners(keys).tolist(), strict=True):
                if names[owner] != self.name and names[owner] not in nodes:
                    nodes.append(names[owner])
        return found

    @property
    def has_others(self) -> bool:
        """Whether any other node may have pages of this pool."""
        return not self.alone or self.previous is not None

    def drop_some(self, replicas: Container[int], now_s: float, out: list[Action]) -> None:
        """Drop some of the pages that are neither this node's nor replicas."""
        if self.next_step_s > now_s or self.ring is None:
            return
        self.next_step_s = now_s + STEP_S
        if self._in_slots:
            self._in_slots = not self._drop_slots(replicas, out)
            if not self._in_slots:
                self._to_drop_from_tiers = [(n, self._tiers.own_keys(n)) for n in self._tiers.namespaces()]
        elif self._to_drop_from_tiers:
            self._drop_from_tiers(out)
        if not self._in_slots and not self._to_drop_from_tiers:
            # pages that were pinned go in the next round
            self._begin_dropping(now_s + AGAIN_S if self._skipped else float("inf"))

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
            # a page still in memory is pinned or a replica: its copy in a tier goes together with it
            foreign = [k for k, mine in zip(some, ours, strict=True) if not mine and k not in committed]
            self._tiers.disown(namespace, foreign, out)
            self.foreign_dropped += len(foreign)

    def _ours_at(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        assert self.ring is not None
        if not self.ring.nodes:
            return np.zeros(len(slots), bool)
        return np.equal(self.ring.owners_at(self._positions(slots)), self.number)

    def _positions(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        key_of = self._store.facts.key
        return positions_of([key_of[slot] or b"" for slot in slots.tolist()])
