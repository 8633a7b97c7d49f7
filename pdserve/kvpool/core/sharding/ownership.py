"""The pages that this node owns under the newest view, and the removal of foreign pages. Pure.

    view changed, pages moving    foreign pages stay: their new owners pull them, readers may still read them
    view stable                   foreign pages are dropped in steps; replicas and pinned pages stay

**Listing.** A new owner asks for its pages with `ListOwned`. A listing reads the slots in order from its
cursor, then the keys that only the tiers hold. One call looks at `MAX_LOOKED_AT` keys at most: a few
milliseconds, however large the arena.

Slots. A page that is committed into a slot behind the cursor was reserved before the listing began, or after
it under the new view. In the first case `writing` of the first answer is above 0, and the new owner lists the
namespace again (cluster/rebalance_plan.py). In the second case the page is this node's own.

Tiers. Cursors from `slots` on are places in a list of the tiers' keys, made when this part begins. A page in
memory is left out only if it was there when the listing began; so a page that moves between memory and a tier
meanwhile is listed once or twice. Each new owner has one such list, since it pulls one namespace at a time.
When the list is gone, `writing` is 1, and the new owner begins again.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from pdserve.kvpool.cluster.ring import Ring, positions_of
from pdserve.kvpool.core.events import Action
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.protocol.cluster_messages import ListOwned, Owned
from pdserve.kvpool.protocol.messages import Fault

MAX_LOOKED_AT: Final = 8192  # keys
MAX_DROPPED: Final = 1024  # pages dropped in one step
STEP_S: Final = 0.005  # between steps: requests are served meanwhile
AGAIN_S: Final = 1.0  # pause before pinned pages are tried again


class TierPages(Protocol):
    """The pages in all tiers of the node."""

    @property
    def ready(self) -> bool:
        """Whether the tiers have reported all pages that survived a restart."""
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


@dataclass(slots=True)
class _Listing:
    """The listing of one new owner. Pages with `first_sequence` or above were reserved after it began."""

    namespace: int
    first_sequence: int
    tier_keys: list[bytes] = field(default_factory=list)


class OwnedListing:
    """The listings under one view, by new owner."""

    def __init__(self, store: PageStore, tiers: TierPages) -> None:
        self._store = store
        self._tiers = tiers
        self._listings: dict[str, _Listing] = {}

    def view_changed(self) -> None:
        self._listings.clear()

    def answer(self, request: ListOwned, ring: Ring) -> Owned:
        """The next pages that `request.node` owns in `ring`."""
        number = ring.number(request.node)
        if number < 0 or request.cursor < 0:
            return Owned(request.id, [], [], 0, 0)
        if request.cursor >= self._store.slots.slots:
            return self._list_tiers(request, ring, number)
        return self._list_slots(request, ring, number)

    def _list_slots(self, request: ListOwned, ring: Ring, number: int) -> Owned:
        writing = self._begin(request, ring, number) if request.cursor == 0 else 0
        slots = self._store.committed_slots(request.cursor, MAX_LOOKED_AT, request.namespace).tolist()
        key_of, length_of = self._store.key_of, self._store.facts.length_bytes
        owners = ring.owners_at(positions_of([key_of(slot) for slot in slots])).tolist()
        theirs = [slot for slot, owner in zip(slots, owners, strict=True) if owner == number]
        found = theirs[: request.limit]
        if len(theirs) > len(found):
            cursor = found[-1] + 1
        elif len(slots) == MAX_LOOKED_AT:
            cursor = slots[-1] + 1
        else:
            cursor = self._store.slots.slots
        if cursor == self._store.slots.slots and not self._begin_tiers(request):
            cursor = 0
        keys, lengths = [key_of(slot) for slot in found], [length_of[slot] for slot in found]
        return Owned(request.id, keys, lengths, cursor, writing)

    def _begin(self, request: ListOwned, ring: Ring, number: int) -> int:
        """A listing begins; the number of reservations, or of tiers, from which more pages may follow."""
        self._listings[request.node] = _Listing(request.namespace, self._store.next_sequence)
        writing = list(self._store.index.namespace(request.namespace).writing)
        count = int(np.count_nonzero(ring.owners_at(positions_of(writing)) == number))
        return count + (not self._tiers.ready)

    def _begin_tiers(self, request: ListOwned) -> bool:
        """The slots are done; whether the tiers have pages."""
        listing = self._listings.setdefault(request.node, _Listing(request.namespace, 0))
        listing.namespace, listing.tier_keys = request.namespace, self._tiers.own_keys(request.namespace)
        return bool(listing.tier_keys)

    def _list_tiers(self, request: ListOwned, ring: Ring, number: int) -> Owned:
        listing = self._listings.get(request.node)
        if listing is None or listing.namespace != request.namespace or not listing.tier_keys:
            return Owned(request.id, [], [], 0, 1)  # the answer before was lost, for example
        start = request.cursor - self._store.slots.slots
        keys = listing.tier_keys[start : start + MAX_LOOKED_AT]
        owners = ring.owners_at(positions_of(keys))
        found: list[bytes] = []
        lengths: list[int] = []
        cursor = request.cursor + len(keys)
        for place in np.flatnonzero(owners == number).tolist():
            if len(found) == request.limit:
                cursor = request.cursor + place
                break
            length_bytes = self._length_bytes(listing, keys[place])
            if length_bytes:
                found.append(keys[place])
                lengths.append(length_bytes)
        if cursor - self._store.slots.slots >= len(listing.tier_keys):
            cursor = 0
            del self._listings[request.node]
        return Owned(request.id, found, lengths, cursor, 0)

    def _length_bytes(self, listing: _Listing, key: bytes) -> int:
        """Length of a page of the tiers' list. 0: it is gone, or was listed among the slots."""
        slot = self._store.index.namespace(listing.namespace).committed.get(key)
        if slot is None:
            return self._tiers.length(listing.namespace, key)
        facts = self._store.facts  # a promoted page may be in a slot that the cursor has passed
        return facts.length_bytes[slot] if facts.sequence[slot] >= listing.first_sequence else 0


class Ownership:
    """`ring` is None before the first view: then every page is this node's."""

    def __init__(self, name: str, store: PageStore, tiers: TierPages) -> None:
        self.ring: Ring | None = None
        self.number = -1  # of this node in the ring; -1: it owns nothing
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
        self._listing = OwnedListing(store, tiers)

    @property
    def epoch(self) -> int:
        return 0 if self.ring is None else self.ring.epoch

    @property
    def alone(self) -> bool:
        """Whether every page is this node's."""
        return self.ring is None or (len(self.ring.nodes) == 1 and self.number == 0)

    def view_changed(self, ring: Ring, *, stable: bool, now_s: float) -> None:
        self.ring, self.stable = ring, stable
        self.number = ring.number(self._name)
        self._listing.view_changed()
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

    def list_owned(self, request: ListOwned) -> Owned | Fault:
        """The answer to a new owner."""
        if self.ring is None or self.ring.epoch != request.epoch:
            message = f"node {self._name} knows epoch {self.epoch}, not {request.epoch}: ask again"
            return Fault(request.id, "stale_view", message)
        return self._listing.answer(request, self.ring)

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
            # pages that were pinned, or that clients with an old view are writing, go in the next round
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
            # a page still in memory is pinned or a replica: its copy in a tier goes together with it
            foreign = [k for k, mine in zip(some, ours, strict=True) if not mine and k not in committed]
            self._tiers.disown(namespace, foreign, out)
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
