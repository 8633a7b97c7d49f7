"""The pages of this node that a new owner may pull: the answers to `ListOwned`. Pure.

A listing reads the slots in order from its cursor, then the keys that only the tiers hold. One call looks at
`MAX_LOOKED_AT` keys at most: a few milliseconds, however large the arena.

Slots. A page that is committed into a slot behind the cursor was reserved before the listing began, or after
it under the new view. In the first case `writing` of the first answer is above 0, and the new owner lists the
namespace again (cluster/rebalance_plan.py). In the second case the page is this node's own.

Tiers. Cursors from `slots` on are places in a list of the tiers' keys, made when this part begins. A page in
memory is left out only if it was there when the listing began; so a page that moves between memory and a tier
meanwhile is listed once or twice. Each new owner has one such list, since it pulls one namespace at a time.
When the list is gone, `writing` is 1, and the new owner begins again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from pdserve.kvpool.cluster.ring import Ring, positions_of
from pdserve.kvpool.core.sharding.tier_pages import TierPages
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.protocol.cluster_messages import ListOwned, Owned

MAX_LOOKED_AT: Final = 8192  # keys


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
