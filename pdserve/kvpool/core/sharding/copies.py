"""Copies of this node's pages on other nodes: the owner's side. Pure.

All pages of a namespace with `copies` above 1 have copies ("replicas") on the next `copies - 1` nodes of the
ring after their owner. The node asks again in time, which renews the replicas' leases, for as long as it has
and owns the page. After that they end with their leases.

The first successor is the next owner when this node leaves. So a page with a replica survives its node.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.core.events import Action, AskReplicas, ReplicasMade
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.protocol.slot_table import COMMITTED

MAX_COPIED_PAGES: Final = 32_768  # per node: about 400 bytes for each
ASKED_PAGES: Final = 1024  # in one message
ASKED_BYTES: Final = 256 << 20  # of new replicas in one message: the peer reads them before it answers
NEW_A_LOOK: Final = 1024  # pages whose place on the ring is computed in one look
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
    renew_at_s: float = 0.0


class Copies:
    """`copies`: how many nodes are to hold each page, by namespace, where they are more than 1. `lease_s`: of
    a replica; it must outlast the time until a lost node is known as lost.
    """

    def __init__(self, store: PageStore, lease_s: float) -> None:
        self.copies: dict[int, int] = {}
        self._store = store
        self._lease_s = lease_s
        self._pages: dict[int, _Page] = {}  # by slot
        self._foreign: set[int] = set()  # slots of namespaces with copies whose pages other nodes own
        self._asked: dict[tuple[str, int], list[int]] = {}  # out: (node, namespace) -> slots

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
        self._forget()
        if 0 <= mine < len(ring.nodes):
            self._find(ring, ring.nodes[mine].node)
        self._renew(now_s, out)

    def view_changed(self) -> None:
        """Owners and successors are others now: begin anew. Existing replicas end with their leases."""
        self._pages.clear()
        self._foreign.clear()

    def made(self, event: ReplicasMade, now_s: float) -> None:
        """A successor answered. Every AskReplicas has one answer."""
        slots = self._asked.pop((event.node, event.namespace), [])
        for slot, key, ok in zip(slots, event.keys, event.mask, strict=False):
            page = self._pages.get(slot)
            if page is None or page.key != key:
                continue
            page.held.pop(event.node, None)
            if ok:
                page.held[event.node] = now_s + self._lease_s
            else:
                page.renew_at_s = min(page.renew_at_s, now_s + self._lease_s * RETRY_SHARE)

    def filled(self, slot: int) -> None:
        """A new page is in the slot."""
        self._foreign.discard(slot)
        self._pages.pop(slot, None)

    def _forget(self) -> None:
        """Pages that are gone, or whose namespace is to have other copies now."""
        for page in list(self._pages.values()):
            if not self._is_there(page) or self.copies.get(page.namespace) != page.copies:
                self.filled(page.slot)

    def _find(self, ring: Ring, mine: str) -> None:
        looked_at = 0
        for namespace, copies in self.copies.items():
            pages = self._store.index.get(namespace)
            for slot in () if pages is None else pages.committed.values():
                if slot in self._foreign or slot in self._pages:
                    continue
                if looked_at == NEW_A_LOOK or len(self._pages) >= MAX_COPIED_PAGES:
                    return
                looked_at += 1
                if not self._found(slot, ring, mine, copies):
                    self._foreign.add(slot)

    def _found(self, slot: int, ring: Ring, mine: str, copies: int) -> bool:
        """This page is to have replicas, if this node (`mine`) owns it: whether it does."""
        facts = self._store.facts
        key = facts.key[slot]
        assert key is not None
        chain = [node.node for node in ring.successors([key], copies)[0]]
        if chain[0] != mine:
            return False
        number = int(facts.namespace[slot])
        self._pages[slot] = _Page(slot, facts.sequence[slot], number, key, chain[1:], copies)
        return True

    def _renew(self, now_s: float, out: list[Action]) -> None:
        asks: dict[tuple[str, int], list[_Page]] = defaultdict(list)
        new_bytes: dict[tuple[str, int], int] = defaultdict(int)
        length = self._store.facts.length_bytes
        for page in self._pages.values():
            if page.renew_at_s > now_s:
                continue
            must_wait = False
            for node in page.successors:
                target, is_new = (node, page.namespace), page.held.get(node, 0.0) <= now_s
                if target in self._asked:
                    must_wait |= is_new
                    continue
                new_bytes[target] += length[page.slot] if is_new else 0
                if asks[target] and (len(asks[target]) >= ASKED_PAGES or new_bytes[target] > ASKED_BYTES):
                    must_wait = True
                    continue
                asks[target].append(page)
            if not must_wait:  # else it is looked at again in the next look
                page.renew_at_s = now_s + self._lease_s / 3
        for (node, namespace), pages in asks.items():
            if pages:
                self._asked[node, namespace] = [page.slot for page in pages]
                keys, lengths = [page.key for page in pages], [length[page.slot] for page in pages]
                out.append(AskReplicas(node, namespace, keys, lengths))

    def _is_there(self, page: _Page) -> bool:
        facts = self._store.facts
        return facts.sequence[page.slot] == page.sequence and self._store.state(page.slot) == COMMITTED
