"""Routing of keys to nodes: by the valid ring, and by the ring before it while pages move. Pure.

Every node sends its clients its view of the ring: in Welcome, and in a View frame at each change. Nodes agree
eventually, so views differ for a short time. A client keeps the last view of each node, and the view with the
largest epoch is valid. The view of a node that cannot be reached does not count. So a restarted pool with
small epochs is accepted as soon as no node of the old pool answers.

A node of epoch 0 has no membership: until another view comes, the configured list is the ring. The list is
also the ring if each of several nodes names only itself: then only their clients join them to a pool. A node
that names only itself may also be the last of a pool (`_is_last_survivor`).

    read     the owner, then the owner on the earlier ring (`Search`)
    write    the owner; a node that answers MOVED has sent a newer view before

A miss is valid for one view only. The new owner may be asked just before it pulls the page. When its answer
arrives, the pages may have moved: the view has no earlier ring any more, or the earlier owner has dropped
them. So if the view changes during a search, the search starts again. This is sufficient, because a node
sends its clients a view before it acts on it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.errors import ConfigError
from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.protocol.cluster_messages import View
from pdserve.kvpool.protocol.messages import NodeAddress, Welcome

MAX_VIEWS: Final = 4  # views that one search follows; a pool that changes faster causes misses


@dataclass(frozen=True, slots=True)
class Rings:
    """One view. `previous` is the ring before it, while pages are still moving."""

    epoch: int
    ring: Ring
    previous: Ring | None = None

    @property
    def addresses(self) -> dict[str, str]:
        """Name → address of every node in either ring. The newer ring's address wins."""
        nodes = [*(self.previous.nodes if self.previous else ()), *self.ring.nodes]
        return {node.node: node.address for node in nodes}

    def reachable_at(self, seeds: Mapping[str, str]) -> dict[str, list[str]]:
        """For each node that a client keeps a link to, its addresses in the order to try them: the configured
        one (`seeds`), then that of the view. A node alone cannot report when others are back, so the seeds
        stay then.
        """
        known = self.addresses
        names = known if len(known) > 1 else {**seeds, **known}
        return {
            node: list(dict.fromkeys(table[node] for table in (seeds, known) if node in table))
            for node in names
        }

    def split(self, keys: Sequence[bytes]) -> dict[str, list[int]]:
        """The indices of `keys` by owner. Empty: there are no nodes."""
        return self.ring.split(keys) if self.ring.nodes else {}

    def others(
        self, keys: Sequence[bytes], indices: Sequence[int], asked: Mapping[int, Collection[str]]
    ) -> dict[str, list[int]]:
        """The next node for each key at the indices `indices`, as indices by node.

        It is the owner or the previous owner, the first of the two that was not `asked`. Keys without such a
        node are left out.
        """
        found: dict[str, list[int]] = {}
        left = list(indices)
        for ring in (self.ring, self.previous):
            if ring is None or not ring.nodes or not left:
                continue
            owners = ring.split([keys[index] for index in left])
            still = []
            for node, chosen in owners.items():
                for index in (left[i] for i in chosen):
                    if node in asked.get(index, ()):
                        still.append(index)
                    else:
                        found.setdefault(node, []).append(index)
            left = sorted(still)
        return {node: sorted(chosen) for node, chosen in found.items()}

    def earlier(self, keys: Sequence[bytes]) -> dict[str, list[int]]:
        """The indices of keys that another node owned before, by that node."""
        if self.previous is None or not keys:
            return {}
        owners = {index: (node,) for node, indices in self.split(keys).items() for index in indices}
        return self.others(keys, range(len(keys)), owners)


class Search:
    """The nodes to ask for keys in each round, until each key is found or no further node may have it."""

    def __init__(self, keys: Sequence[bytes], rings: Rings) -> None:
        """`rings`: the view that chose the first nodes."""
        self._keys = keys
        self._rings = rings
        self._views = 1
        self._asked: dict[int, set[str]] = {}

    def further(self, missed: Sequence[int], asked: Sequence[str], rings: Rings) -> dict[str, list[int]]:
        """The next nodes for the indices that were `missed`, as indices by node. Empty: the search ends.

        `asked`: for each key, the node that was asked last. `rings`: the view that is valid now.
        """
        if rings is not self._rings:
            if self._views == MAX_VIEWS:
                return {}
            self._views += 1
            self._rings = rings
            self._asked.clear()
        else:
            for index in missed:
                self._asked.setdefault(index, set()).add(asked[index])
        return rings.others(self._keys, missed, self._asked)


class ViewBook:
    """The last view of every node, and the valid one: `rings`, which is replaced as a whole."""

    def __init__(self, seeds: Sequence[NodeAddress]) -> None:
        """`seeds`: the configured nodes. Raises ConfigError (see `Ring`)."""
        self.rings = self._static = Rings(0, Ring(seeds))
        self._seeds = frozenset(node.node for node in seeds)
        self._lost: set[str] = set()  # nodes that cannot be reached
        self._latest_views: dict[str, tuple[int, Rings]] = {}  # by node: (incarnation, view)
        self._retired: dict[str, int] = {}  # by node: the incarnation before, whose views may still arrive

    def on_view(self, node: str, incarnation: int, view: View | Welcome) -> bool:
        """A node sent its view. True if the valid ring changed. A view without a valid ring is ignored."""
        if view.epoch <= 0 or not view.nodes or self._retired.get(node) == incarnation:
            return False
        self._lost.discard(node)
        before = self._latest_views.get(node)
        if before is not None and before[0] != incarnation:
            self._retired[node] = before[0]
        elif before is not None and not _newer(view, before[1]):
            return False
        try:
            rings = self._known(view)
        except ConfigError:
            return False
        self._latest_views[node] = (incarnation, rings)
        return self._choose()

    def on_unreachable(self, node: str) -> bool:
        """The node cannot be reached, so its view does not count. True if the valid ring changed."""
        self._lost.add(node)
        self._latest_views.pop(node, None)
        return self._choose()

    def _choose(self) -> bool:
        if not self._latest_views:
            return False
        node, (_, best) = max(
            self._latest_views.items(), key=lambda said: (said[1][1].epoch, said[1][1].previous is None)
        )
        if _is_alone(node, best) and not self._is_last_survivor(best):
            best = self._static if len(self._latest_views) > 1 else self.rings
        changed = best is not self.rings
        self.rings = best
        return changed

    def _is_last_survivor(self, alone: Rings) -> bool:
        """Whether a node that names only itself is the last of a pool.

        This holds if its view is newer than the views that name several nodes, or if no other node can be
        reached.
        """
        several = [rings for node, (_, rings) in self._latest_views.items() if not _is_alone(node, rings)]
        if several or (len(self.rings.ring.nodes) > 1 and 0 < self.rings.epoch < alone.epoch):
            return True
        return len(self._latest_views) == 1 and self._seeds <= self._lost | self._latest_views.keys()

    def _known(self, view: View | Welcome) -> Rings:
        """The view's rings. Equal views share one object, since building a ring takes time."""
        nodes, previous = _ordered(view.nodes), _ordered(view.previous)
        candidates = [self.rings, *(rings for _, rings in self._latest_views.values())]
        built = {rings.ring.nodes: rings.ring for rings in candidates}
        built |= {rings.previous.nodes: rings.previous for rings in candidates if rings.previous is not None}
        ring = built.get(nodes) or Ring(nodes)
        before = (built.get(previous) or Ring(previous)) if previous and previous != nodes else None
        for rings in candidates:
            if (rings.epoch, rings.ring, rings.previous) == (view.epoch, ring, before):
                return rings
        return Rings(view.epoch, ring, before)


def _is_alone(node: str, rings: Rings) -> bool:
    """Whether the node's view names only itself."""
    return rings.previous is None and [other.node for other in rings.ring.nodes] == [node]


def _newer(view: View | Welcome, than: Rings) -> bool:
    """Whether the view is newer. In one epoch a view changes once: `previous` ends with the move of pages."""
    if view.epoch == than.epoch:
        return than.previous is not None and not view.previous
    return view.epoch > than.epoch


def _ordered(nodes: Sequence[NodeAddress]) -> tuple[NodeAddress, ...]:
    return tuple(sorted(nodes, key=lambda node: node.node))
