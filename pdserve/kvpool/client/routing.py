"""Which nodes to ask for a page: the ring that counts, and the one before it while pages move. Pure.

Every node tells its clients its view of the ring: in Welcome, and in a View frame whenever it changes. Nodes
agree in the end, not at once, so views differ for a moment. A client keeps the last view of each node, and
the view with the largest epoch counts. The view of a node that cannot be reached does not count. So a pool
that was started anew, with small epochs, is believed as soon as no node of the old one answers.

A node of epoch 0 knows of no membership: until another view comes, the configured list is the ring. It is the
ring, too, where each of several nodes names itself alone: nobody told them of each other, and their clients
make a pool of them. A node that names itself alone may also be the last of a pool (`_is_last_survivor`).

    read     the owner, then the owner on the ring before (`Search`)
    write    the owner; a node that answers MOVED has sent a newer view before

A miss is true of one view only. The new owner may be asked just before it pulls the page. When its answer
arrives the pages may have moved: the view has no earlier ring any more, or the earlier owner has dropped
them. So a search that ends under another view than it began under starts again. That is enough, because a
node sends its clients a view before it acts on it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.errors import ConfigError
from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.protocol.cluster_messages import View
from pdserve.kvpool.protocol.messages import NodeAddress, Welcome

MAX_VIEWS: Final = 4  # that one search follows: a pool that changes faster costs misses


@dataclass(frozen=True, slots=True)
class Rings:
    """One view. `previous` is the ring before it, while pages are still moving."""

    epoch: int
    ring: Ring
    previous: Ring | None = None

    @property
    def addresses(self) -> dict[str, str]:
        """Every node that may be asked, by name; where both rings name one, the newer address."""
        nodes = [*(self.previous.nodes if self.previous else ()), *self.ring.nodes]
        return {node.node: node.address for node in nodes}

    def split(self, keys: Sequence[bytes]) -> dict[str, list[int]]:
        """The places of `keys` by owner; empty when there are no nodes."""
        return self.ring.split(keys) if self.ring.nodes else {}

    def others(
        self, keys: Sequence[bytes], places: Sequence[int], asked: Mapping[int, Collection[str]]
    ) -> dict[str, list[int]]:
        """The next node to ask for each key at `places`: owner or previous owner, the first of the two that
        was not `asked` for that place. Places by node; keys without such a node are left out.
        """
        found: dict[str, list[int]] = {}
        left = list(places)
        for ring in (self.ring, self.previous):
            if ring is None or not ring.nodes or not left:
                continue
            owners = ring.split([keys[place] for place in left])
            still = []
            for node, chosen in owners.items():
                for place in (left[i] for i in chosen):
                    if node in asked.get(place, ()):
                        still.append(place)
                    else:
                        found.setdefault(node, []).append(place)
            left = sorted(still)
        return {node: sorted(chosen) for node, chosen in found.items()}

    def earlier(self, keys: Sequence[bytes]) -> dict[str, list[int]]:
        """The places of keys that another node owned before, by that node."""
        if self.previous is None or not keys:
            return {}
        owners = {place: (node,) for node, places in self.split(keys).items() for place in places}
        return self.others(keys, range(len(keys)), owners)


class Search:
    """The nodes to ask for keys, round by round, until each is found or no node is left that may have it."""

    def __init__(self, keys: Sequence[bytes], rings: Rings) -> None:
        """`rings`: by which the first nodes were chosen."""
        self._keys = keys
        self._rings = rings
        self._views = 1
        self._asked: dict[int, set[str]] = {}

    def further(self, missed: Sequence[int], asked: Sequence[str], rings: Rings) -> dict[str, list[int]]:
        """The next nodes to ask for the places that were `missed`, by node; empty at the end.

        `asked`: by place, the node asked last. `rings`: the view that counts now.
        """
        if rings is not self._rings:
            if self._views == MAX_VIEWS:
                return {}
            self._views += 1
            self._rings = rings
            self._asked.clear()
        else:
            for place in missed:
                self._asked.setdefault(place, set()).add(asked[place])
        return rings.others(self._keys, missed, self._asked)


class ViewBook:
    """What every node said last, and what counts. `rings` is replaced as a whole, never changed."""

    def __init__(self, seeds: Sequence[NodeAddress]) -> None:
        """`seeds`: the configured nodes. Raises ConfigError (see `Ring`)."""
        self.rings = self._static = Rings(0, Ring(seeds))
        self._seeds = frozenset(node.node for node in seeds)
        self._lost: set[str] = set()  # cannot be reached
        self._latest_views: dict[str, tuple[int, Rings]] = {}  # by node: its incarnation, what it said
        self._retired: dict[str, int] = {}  # by node: the incarnation before, whose words may still arrive

    def on_view(self, node: str, incarnation: int, view: View | Welcome) -> bool:
        """A node sent its view; whether another ring counts now. A view that makes no ring is ignored."""
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
        """The node cannot be reached, so its view does not count; whether another ring counts now."""
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
        """Whether a node that names itself alone is the rest of a pool: its view is newer than the views that
        name several nodes, or no other node can be reached.
        """
        several = [rings for node, (_, rings) in self._latest_views.items() if not _is_alone(node, rings)]
        if several or (len(self.rings.ring.nodes) > 1 and 0 < self.rings.epoch < alone.epoch):
            return True
        return len(self._latest_views) == 1 and self._seeds <= self._lost | self._latest_views.keys()

    def _known(self, view: View | Welcome) -> Rings:
        """The view's rings; the very same object for the same view, since a ring takes a while to build."""
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
    """Whether the node names itself alone."""
    return rings.previous is None and [other.node for other in rings.ring.nodes] == [node]


def _newer(view: View | Welcome, than: Rings) -> bool:
    """Within an epoch a view changes once: when the pages have moved, `previous` goes."""
    if view.epoch == than.epoch:
        return than.previous is not None and not view.previous
    return view.epoch > than.epoch


def _ordered(nodes: Sequence[NodeAddress]) -> tuple[NodeAddress, ...]:
    return tuple(sorted(nodes, key=lambda node: node.node))
