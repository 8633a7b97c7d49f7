"""Replicas of this node's hot pages on other nodes: the owner's side. Pure.

A page with more than `hot_reads_s` reads per second gets replicas on the next `max_replicas` nodes of the
ring after its owner. `counts` says how many nodes in a row hold it; answers to Get pass this on, so that
readers spread. Every third of a lease the node asks again, which renews the replicas. They end when the page
has cooled to half of `hot_reads_s`, so that they do not come and go; or when this node owns the page no more.

This node does not see reads on other nodes. Reads spread evenly, so the page's rate is the rate seen here
times the number of nodes that hold it.

The first successor is the next owner when this node leaves. So a hot page survives its node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.core.events import Action, AskReplicas, EndReplicasAt, ReplicasMade
from pdserve.kvpool.core.sessions import ReplicationLimits
from pdserve.kvpool.core.sharding.heat import Heat
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.protocol.slot_table import COMMITTED

COOL_SHARE = 0.5  # of `hot_reads_s`: below it a page is hot no more
MAX_HOT_PAGES = 1024  # per node; at most one message per successor and renewal


@dataclass(slots=True)
class _HotPage:
    slot: int
    sequence: int
    namespace: int
    key: bytes
    successors: list[str]
    held: dict[str, float] = field(default_factory=dict)  # node: until when
    renew_at_s: float = 0.0


class Replication:
    """`counts`: slot -> how many successors hold its page; checked against the slot's filling."""

    def __init__(self, store: PageStore, limits: ReplicationLimits) -> None:
        self.counts: dict[int, int] = {}
        self._store = store
        self._limits = limits
        self._pages: dict[int, _HotPage] = {}  # by slot
        self._asked: dict[tuple[str, int], list[int]] = {}  # out: (node, namespace) -> slots

    def __len__(self) -> int:
        return len(self._pages)

    def advance(self, heat: Heat, ring: Ring, mine: int, now_s: float, out: list[Action]) -> None:
        """About once a second: find hot pages, end cooled ones, renew the others. `mine` is this node's
        number in the ring.
        """
        heat.advance(now_s)
        self._end_cold(heat, now_s, out)
        self._find_hot(heat, ring, mine)
        self._renew(now_s, out)

    def view_changed(self) -> None:
        """Owners and successors are others now: begin anew. Existing replicas end with their leases."""
        self._pages.clear()
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
                page.held[event.node] = now_s + self._limits.lease_s
            self._count(page, now_s)

    def filled(self, slot: int) -> None:
        """A new page is in the slot."""
        if self._pages.pop(slot, None) is not None:
            self.counts.pop(slot, None)

    def _end_cold(self, heat: Heat, now_s: float, out: list[Action]) -> None:
        ends: dict[tuple[str, int], list[bytes]] = defaultdict(list)
        cool = self._limits.hot_reads_s * COOL_SHARE
        for page in list(self._pages.values()):
            holders = 1 + self._count(page, now_s)
            gone = not self._is_there(page)
            if not gone and heat.reads_s(page.slot) * holders >= cool:
                continue
            self.filled(page.slot)
            for node in page.held:
                ends[node, page.namespace].append(page.key)
        out.extend(EndReplicasAt(node, namespace, keys) for (node, namespace), keys in ends.items())

    def _find_hot(self, heat: Heat, ring: Ring, mine: int) -> None:
        facts = self._store.facts
        for slot in list(heat.hot):
            if heat.reads_s(slot) <= self._limits.hot_reads_s or self._store.state(slot) != COMMITTED:
                heat.hot.discard(slot)
            elif slot not in self._pages and len(self._pages) < MAX_HOT_PAGES:
                key = facts.key[slot]
                assert key is not None
                chain = [node.node for node in ring.successors(key, 1 + self._limits.max_replicas)]
                if mine >= 0 and chain[0] == ring.nodes[mine].node:
                    number = self._store.facts.namespace[slot]
                    self._pages[slot] = _HotPage(slot, facts.sequence[slot], number, key, chain[1:])

    def _renew(self, now_s: float, out: list[Action]) -> None:
        asks: dict[tuple[str, int], list[_HotPage]] = defaultdict(list)
        for page in self._pages.values():
            if page.renew_at_s <= now_s and page.successors:
                page.renew_at_s = now_s + self._limits.lease_s / 3
                for node in page.successors:
                    if (node, page.namespace) not in self._asked:
                        asks[node, page.namespace].append(page)
        for (node, namespace), pages in asks.items():
            self._asked[node, namespace] = [page.slot for page in pages]
            length = self._store.facts.length_bytes
            out.append(
                AskReplicas(
                    node, namespace, [page.key for page in pages], [length[page.slot] for page in pages]
                )
            )

    def _count(self, page: _HotPage, now_s: float) -> int:
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

    def _is_there(self, page: _HotPage) -> bool:
        facts = self._store.facts
        return facts.sequence[page.slot] == page.sequence and self._store.state(page.slot) == COMMITTED

    def hot_keys(self) -> Sequence[bytes]:
        """For tests and lists."""
        return [page.key for page in self._pages.values()]
