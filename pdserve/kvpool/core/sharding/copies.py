"""Copies of this node's pages on other nodes: the owner's side. Pure.

All pages of a namespace with `copies` above 1 have copies ("replicas") on the next `copies - 1` nodes of the
ring after their owner. The node pushes them there, and pushes again in time, which renews the replicas'
leases, for as long as it has and owns the page. After that they end with their leases.

The first successor is the next owner when this node leaves. So a page with a replica survives its node.

What is to be done when lies in a heap. New pages come by `filled`; a slow walk over the namespaces, some
pages in one look, finds the others: those from before a change of the view, or beyond a bound that is not
reached any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

import numpy as np

from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.core.events import TAKEN, Action, PagesPushed, PushPages
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.protocol.slot_table import COMMITTED

MAX_COPIED_PAGES: Final = 32_768  # per node: about 400 bytes for each
ASKED_PAGES: Final = 1024  # in one push
ASKED_BYTES: Final = 256 << 20  # of new replicas in one push
NEW_A_LOOK: Final = 512  # pages whose place on the ring is computed in one look
DUE_A_LOOK: Final = 1536  # pages that are pushed in one look, or put off to the next
RETRY_SHARE: Final = 1 / 30  # of a lease, after a node did not make a replica


@dataclass(slots=True)
class _Page:
    slot: int
    sequence: int
    namespace: int
    key: bytes
    successors: list[str]
    copies: int  # that its namespace is to have
    held: dict[str, float] = field(default_factory=dict)  # node: until when
    due_s: float = 0.0  # an entry of the heap with another time is void


class Copies:
    """`copies`: how many nodes are to hold each page, by namespace, where they are more than 1. `lease_s`: of
    a replica; it must outlast the time until a lost node is known as lost.
    """

    def __init__(self, store: PageStore, lease_s: float) -> None:
        self.copies: dict[int, int] = {}
        self.pages_pushed = 0
        self._store = store
        self._lease_s = lease_s
        self._pages: dict[int, _Page] = {}  # by slot
        self._due: list[tuple[float, int, int]] = []  # when, slot, sequence
        self._new: list[int] = []  # slots of pages that came since the last look
        self._walk: list[int] = []  # namespaces to be walked over, from this slot of the first one on
        self._cursor = 0
        self._out: set[tuple[str, int]] = set()  # (node, namespace) with a push under way

    def __len__(self) -> int:
        return len(self._pages)

    def configure(self, namespace: int, copies: int) -> None:
        """So many nodes are to hold each page of a namespace; 1: its owner alone."""
        if copies > 1:
            self.copies[namespace] = copies
        else:
            self.copies.pop(namespace, None)

    def advance(self, ring: Ring, mine: int, now_s: float, out: list[Action]) -> None:
        """About once a second: find pages that are to have replicas, and renew those that have.
        `mine` is this node's number in the ring.
        """
        if self.copies and 0 <= mine < len(ring.nodes):
            self._find(ring, mine, now_s)
        if self._due:
            self._renew(now_s, out)

    def view_changed(self) -> None:
        """Owners and successors are others now: begin anew. Existing replicas end with their leases."""
        self._pages.clear()
        self._due.clear()
        self._new.clear()
        self._walk, self._cursor = [], 0

    def pushed(self, event: PagesPushed, now_s: float) -> None:
        """A successor answered."""
        push = event.push
        self._out.discard((push.node, push.namespace))
        self.pages_pushed += event.copied
        find = self._store.find
        for key, outcome in zip(push.keys, event.outcomes, strict=True):
            page = self._pages.get(find(push.namespace, key))
            if page is None or page.key != key:
                continue
            page.held.pop(push.node, None)
            if outcome == TAKEN:
                page.held[push.node] = now_s + self._lease_s
            else:
                self._expect(page, min(page.due_s, now_s + self._lease_s * RETRY_SHARE))

    def filled(self, slots: Sequence[int]) -> None:
        """New pages are in these slots."""
        if self.copies:
            for slot in slots:
                self._pages.pop(slot, None)
            if len(self._new) < MAX_COPIED_PAGES:
                self._new.extend(slots)

    def _find(self, ring: Ring, mine: int, now_s: float) -> None:
        new, self._new = self._new[:NEW_A_LOOK], self._new[NEW_A_LOOK:]
        walked = self._walk_on(NEW_A_LOOK - len(new))
        room = MAX_COPIED_PAGES - len(self._pages)
        facts, states = self._store.facts, self._store.states
        slots = [
            slot
            for slot in dict.fromkeys([*new, *walked])
            if slot not in self._pages and states[slot] == COMMITTED and facts.namespace[slot] in self.copies
        ]
        keys = [self._store.key_of(slot) for slot in slots]
        own = np.flatnonzero(ring.owners(keys) == mine).tolist()[:room] if keys else []
        chains = ring.successors([keys[i] for i in own], max(self.copies.values())) if own else []
        for i, chain in zip(own, chains, strict=True):
            slot, number = slots[i], int(facts.namespace[slots[i]])
            copies, names = self.copies[number], [node.node for node in chain]
            page = _Page(slot, facts.sequence[slot], number, keys[i], names[1:copies], copies)
            self._pages[slot] = page
            self._expect(page, now_s)

    def _walk_on(self, count: int) -> list[int]:
        """The next pages of one of the namespaces with copies; after its last page comes the next one."""
        self._walk = self._walk or list(self.copies)
        found: list[int] = self._store.committed_slots(self._cursor, count, self._walk[0]).tolist()
        if len(found) < count:
            self._walk.pop(0)
        self._cursor = found[-1] + 1 if len(found) == count and found else 0
        return found

    def _expect(self, page: _Page, due_s: float) -> None:
        page.due_s = due_s
        heappush(self._due, (due_s, page.slot, page.sequence))

    def _take_due(self, now_s: float) -> _Page | None:
        """The next page that is due, None if there is none. Those that are gone are forgotten."""
        while self._due and self._due[0][0] <= now_s:
            due_s, slot, sequence = heappop(self._due)
            page = self._pages.get(slot)
            if page is None or page.sequence != sequence or page.due_s != due_s:
                continue
            if self._is_there(page) and self.copies.get(page.namespace) == page.copies:
                return page
            del self._pages[slot]
        return None

    def _renew(self, now_s: float, out: list[Action]) -> None:
        asks: dict[tuple[str, int], list[_Page]] = defaultdict(list)
        new_bytes: dict[tuple[str, int], int] = defaultdict(int)
        length = self._store.facts.length_bytes
        looked: list[tuple[_Page, float]] = []
        while len(looked) < DUE_A_LOOK and (page := self._take_due(now_s)) is not None:
            must_wait = False
            for node in page.successors:
                target, is_new = (node, page.namespace), page.held.get(node, 0.0) <= now_s
                if target in self._out:
                    must_wait |= is_new
                    continue
                new_bytes[target] += length[page.slot] if is_new else 0
                if asks[target] and (len(asks[target]) >= ASKED_PAGES or new_bytes[target] > ASKED_BYTES):
                    must_wait = True
                    continue
                asks[target].append(page)
            looked.append((page, now_s if must_wait else now_s + self._lease_s / 3))
        for page, due_s in looked:
            self._expect(page, due_s)
        for (node, namespace), pages in asks.items():
            if pages:
                self._out.add((node, namespace))
                keys, lengths = [page.key for page in pages], [length[page.slot] for page in pages]
                out.append(PushPages(node, namespace, keys, lengths, replica=True))

    def _is_there(self, page: _Page) -> bool:
        facts = self._store.facts
        return facts.sequence[page.slot] == page.sequence and self._store.state(page.slot) == COMMITTED
