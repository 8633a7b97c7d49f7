"""Copies of this node's pages on other nodes: the owner's side. Pure.

Two kinds of pages have copies ("replicas") on the next nodes of the ring after their owner:

- *Hot* pages: with more than `hot_reads_s` reads per second, on `max_replicas` nodes. They end when the page
  has cooled to half of `hot_reads_s`, so that they do not come and go. This node does not see reads on other
  nodes. Reads spread evenly, so the page's rate is the rate seen here times the number of nodes that hold it.
- Pages of a namespace with `copies` above 1: all of them, on `copies - 1` nodes, for as long as they are
  there.

`counts` says how many nodes in a row hold a page; answers to Get pass this on, so that readers spread. The
node asks again in time, which renews the replicas' leases. They end with the page, too, and when this node
owns it no more.

The first successor is the next owner when this node leaves. So a page with a replica survives its node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.core.events import Action, AskReplicas, EndReplicasAt, ReplicasMade
from pdserve.kvpool.core.sessions import ReplicationLimits
from pdserve.kvpool.core.sharding.heat import Heat
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.protocol.messages import MAX_PAGES
from pdserve.kvpool.protocol.slot_table import COMMITTED

COOL_SHARE = 0.5  # of `hot_reads_s`: below it a page is hot no more
MAX_HOT_PAGES = 1024  # per node; at most one message per successor and renewal
MAX_COPIED_PAGES: Final = 32_768  # per node, of namespaces with copies: about 400 bytes for each
COPY_LEASES: Final = 10
"""A copy's lease, in those of a hot page. It must outlast the time until a lost node is known as lost."""
ASKED_PAGES: Final = 1024  # in one message
ASKED_BYTES: Final = 256 << 20  # of new replicas in one message: the peer reads them before it answers
NEW_A_LOOK: Final = 1024  # pages whose place on the ring is computed in one look


@dataclass(slots=True)
class _Page:
    slot: int
    sequence: int
    namespace: int
    key: bytes
    successors: list[str]
    copies: int  # that its namespace is to have; 0: it is a hot page
    lease_s: float
    held: dict[str, float] = field(default_factory=dict)  # node: until when
    renew_at_s: float = 0.0

    @property
    def is_hot(self) -> bool:
        return not self.copies


class Replication:
    """`counts`: slot -> how many successors hold its page; checked against the slot's filling. `copies`: by
    namespace, where they are more than 1.
    """

    def __init__(self, store: PageStore, limits: ReplicationLimits) -> None:
        self.counts: dict[int, int] = {}
        self.copies: dict[int, int] = {}
        self._store = store
        self._limits = limits
        self._pages: dict[int, _Page] = {}  # by slot
        self._hot = 0  # of them
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

    def advance(self, heat: Heat | None, ring: Ring, mine: int, now_s: float, out: list[Action]) -> None:
        """About once a second: find pages that are to have replicas, end those of others, renew the rest.
        `mine` is this node's number in the ring. `heat`: None where hot pages have no replicas.
        """
        if heat is not None:
            heat.advance(now_s)
        self._end(heat, now_s, out)
        if 0 <= mine < len(ring.nodes):
            name = ring.nodes[mine].node
            self._find_copied(ring, name)
            if heat is not None:
                self._find_hot(heat, ring, name)
        self._renew(now_s, out)

    def view_changed(self) -> None:
        """Owners and successors are others now: begin anew. Existing replicas end with their leases."""
        self._pages.clear()
        self._hot = 0
        self._foreign.clear()
        self.counts.clear()

    def made(self, event: ReplicasMade, now_s: float) -> None:
        """A successor answered. Every AskReplicas has one answer."""
        slots = self._asked.pop((event.node, event.namespace), [])
        for slot, key, ok in zip(slots, event.keys, event.mask, strict=False):
            page = self._pages.get(slot)
            if page is None or page.key != key:
                continue
            page.held.pop(event.node, None)
            if ok:
                page.held[event.node] = now_s + page.lease_s
            else:
                page.renew_at_s = min(page.renew_at_s, now_s + self._limits.lease_s / 3)
            self._count(page, now_s)

    def filled(self, slot: int) -> None:
        """A new page is in the slot."""
        self._foreign.discard(slot)
        if (page := self._pages.pop(slot, None)) is not None:
            self._hot -= page.is_hot
            self.counts.pop(slot, None)

    def _end(self, heat: Heat | None, now_s: float, out: list[Action]) -> None:
        ends: dict[tuple[str, int], list[bytes]] = defaultdict(list)
        for page in list(self._pages.values()):
            holders = 1 + self._count(page, now_s)
            if self._is_there(page) and self._is_wanted(page, heat, holders):
                continue
            self.filled(page.slot)
            for node in page.held:
                ends[node, page.namespace].append(page.key)
        for (node, namespace), keys in ends.items():
            parts = (keys[start : start + MAX_PAGES] for start in range(0, len(keys), MAX_PAGES))
            out.extend(EndReplicasAt(node, namespace, part) for part in parts)

    def _is_wanted(self, page: _Page, heat: Heat | None, holders: int) -> bool:
        if not page.is_hot:
            return self.copies.get(page.namespace) == page.copies
        cool = self._limits.hot_reads_s * COOL_SHARE
        return heat is not None and heat.reads_s(page.slot) * holders >= cool

    def _find_copied(self, ring: Ring, mine: str) -> None:
        looked_at = 0
        for namespace, copies in self.copies.items():
            pages = self._store.index.get(namespace)
            for slot in () if pages is None else pages.committed.values():
                if slot in self._foreign or slot in self._pages:
                    continue
                if looked_at == NEW_A_LOOK or len(self._pages) - self._hot >= MAX_COPIED_PAGES:
                    return
                looked_at += 1
                if not self._found(slot, ring, mine, copies - 1, is_hot=False):
                    self._foreign.add(slot)

    def _find_hot(self, heat: Heat, ring: Ring, mine: str) -> None:
        for slot in list(heat.hot):
            if heat.reads_s(slot) <= self._limits.hot_reads_s or self._store.state(slot) != COMMITTED:
                heat.hot.discard(slot)
            elif slot not in self._pages and self._hot < MAX_HOT_PAGES:
                self._found(slot, ring, mine, self._limits.max_replicas, is_hot=True)

    def _found(self, slot: int, ring: Ring, mine: str, replicas: int, *, is_hot: bool) -> bool:
        """This page is to have replicas, if this node (`mine`) owns it: whether it does."""
        facts = self._store.facts
        key = facts.key[slot]
        assert key is not None
        chain = [node.node for node in ring.successors(key, 1 + replicas)]
        if chain[0] != mine:
            return False
        lease_s = self._limits.lease_s * (1 if is_hot else COPY_LEASES)
        number = int(facts.namespace[slot])
        self._pages[slot] = _Page(
            slot, facts.sequence[slot], number, key, chain[1:], 0 if is_hot else 1 + replicas, lease_s
        )
        self._hot += is_hot
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
                place, is_new = (node, page.namespace), page.held.get(node, 0.0) <= now_s
                if place in self._asked:
                    must_wait |= is_new and not page.is_hot
                    continue
                new_bytes[place] += length[page.slot] if is_new else 0
                if asks[place] and (len(asks[place]) >= ASKED_PAGES or new_bytes[place] > ASKED_BYTES):
                    must_wait = True
                    continue
                asks[place].append(page)
            if not must_wait:  # else it is looked at again in the next look
                page.renew_at_s = now_s + page.lease_s / 3
        for (node, namespace), pages in asks.items():
            if pages:
                self._asked[node, namespace] = [page.slot for page in pages]
                keys, lengths = [page.key for page in pages], [length[page.slot] for page in pages]
                out.append(AskReplicas(node, namespace, keys, lengths))

    def _count(self, page: _Page, now_s: float) -> int:
        """The number of successors in a row that hold the page."""
        count = 0
        for node in page.successors:
            if page.held.get(node, 0.0) <= now_s:
                break
            count += 1
        if count:
            self.counts[page.slot] = count
        else:
            self.counts.pop(page.slot, None)
        return count

    def _is_there(self, page: _Page) -> bool:
        facts = self._store.facts
        return facts.sequence[page.slot] == page.sequence and self._store.state(page.slot) == COMMITTED

    def hot_keys(self) -> Sequence[bytes]:
        """For tests and lists."""
        return [page.key for page in self._pages.values() if page.is_hot]
