"""What a change of the ring means for this node: who owns what is told to `NodeState`, which pushes away what
others own (core/sharding/handover.py); that nothing is left is told to the others; and the node leaves.

Lives in the node's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from pdserve.errors import PoolRefused
from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.core.events import Event, Settled, ViewChanged
from pdserve.kvpool.node.config import PoolNodeConfig
from pdserve.kvpool.node.peers.gossip import Gossiper, Handler
from pdserve.kvpool.node.peers.page_fetch import PageFetcher
from pdserve.kvpool.node.peers.page_push import PagePusher
from pdserve.kvpool.node.serving.connection import ClientConnection
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import ACTIVE, LEAVING, LEFT, Drain

logger = logging.getLogger(__name__)

LEFT_GRACE_S: Final = 1.0  # from having left until the process stops: the others are told meanwhile


class Rebalancer:
    """Follows the ring, and lets the node leave the pool. `feed` and `stop` are the node's."""

    def __init__(
        self,
        config: PoolNodeConfig,
        gossip: Gossiper,
        movers: tuple[PagePusher, PageFetcher],
        feed: Callable[[Event], None],
        stop: Callable[[], None],
    ) -> None:
        self._config = config
        self._gossip = gossip
        self._movers = movers
        self._feed = feed
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        self._ring = Ring([])
        self._seen: tuple[int, bool] | None = None  # epoch, stable: what NodeState was told
        self._leaving = False
        gossip.on_change.append(self.follow)

    def routes(self) -> dict[type, Handler]:
        """Which requests are answered here."""
        return {Drain: self._drain}

    def settled(self, action: Settled) -> None:
        """An action of NodeState: tell the others, but after its other actions are carried out."""
        self._loop.call_soon(self._gossip.settle, action.epoch)

    def follow(self) -> None:
        """The members or the view changed, perhaps."""
        cluster = self._gossip.cluster
        view, stable = cluster.view, cluster.settled
        if self._movers[0].closed or self._seen == (view.epoch, stable):
            return
        if self._seen is None or self._seen[0] != view.epoch:
            self._ring = Ring(view.nodes, view.epoch)
            for mover in self._movers:
                mover.drop_links()
        self._seen = (view.epoch, stable)
        previous = Ring(view.previous) if view.previous else None
        self._feed(ViewChanged(self._ring, stable, previous))
        if cluster.me.status == LEFT and self._config.stop_when_drained:
            self._loop.call_later(LEFT_GRACE_S, self._stop)
        if self._leaving and cluster.me.status == ACTIVE:
            logger.warning("node %s: it stays: no other node is left to take its pages", cluster.name)
        self._leaving = cluster.me.status == LEAVING

    def _drain(self, connection: ClientConnection, request: Drain) -> None:
        try:
            self._gossip.leave()
        except PoolRefused as error:
            connection.send(m.Fault(request.id, "last_node", str(error)))
            return
        logger.info("node %s: leaving: it pushes its pages to the others", self._config.name)
        connection.send(m.Done(request.id))
