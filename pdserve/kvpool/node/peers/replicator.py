"""Replicas of pages: asks other nodes to hold them, and makes those that other nodes ask for.

Lives in the node's event loop; `core.sharding.copies` decides which pages get replicas where.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from pdserve.errors import PdserveError, PoolRefused
from pdserve.kvpool.core.events import AskReplicas, Event, ReplicasMade
from pdserve.kvpool.namespaces.catalog import Namespaces
from pdserve.kvpool.node.peers.page_fetch import SLOWEST_BYTES_S, LocalSession, PageFetch, Space
from pdserve.kvpool.node.serving.connection import ClientConnection
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import PullPages

logger = logging.getLogger(__name__)

MAX_PULLS: Final = 4  # requests of other nodes for replicas that are carried out at a time


class Replicator:
    """The replicas of one node. `name`: the node's; `feed` gives events to its state."""

    def __init__(
        self,
        name: str,
        pages: PageFetch,
        local: LocalSession,
        namespaces: Namespaces,
        feed: Callable[[Event], None],
    ) -> None:
        self.pages_pulled = 0
        self._name = name
        self._pages = pages
        self._local = local
        self._namespaces = namespaces
        self._feed = feed
        self._pulls = 0

    def ask_replicas(self, action: AskReplicas) -> None:
        """An action of NodeState."""
        self._pages.spawn(self._ask_replicas(action))

    async def _ask_replicas(self, action: AskReplicas) -> None:
        mask = [False] * len(action.keys)
        try:
            space = self._space(action.namespace)
            mask = await self._pages.ask(
                action.node,
                "replicas",
                lambda link, deadline: link.ask_replicas(space, action.keys, action.lengths, deadline),
                more_s=sum(action.lengths) / SLOWEST_BYTES_S,  # those that it has are not read again
            )
        except PdserveError as error:
            logger.info("node %s: no replicas at %s: %s", self._name, action.node, error)
        finally:
            self._feed(ReplicasMade(action.node, action.namespace, action.keys, mask))

    def pull(self, connection: ClientConnection, request: PullPages) -> None:
        """Another node wants replicas of its pages here."""
        peer = connection.hello.node if connection.hello is not None else ""
        if self._pulls >= MAX_PULLS or self._pages.address(peer) is None:
            connection.send(m.Done(request.id, 0))
            return
        self._pulls += 1
        self._pages.spawn(self._make_replicas(connection, peer, request))

    async def _make_replicas(self, connection: ClientConnection, peer: str, request: PullPages) -> None:
        count = 0
        try:
            space = self._space(request.namespace)
            pulled = await self._pages.fetch(
                peer, "fetch", space, request.keys, request.lengths, replica=True
            )
            self.pages_pulled += pulled.pages
            here = await self._local.call(lambda n: m.Exists(n, request.namespace, request.keys))
            count = sum(here.mask) if isinstance(here, m.Present) else 0
        except (PdserveError, ValueError) as error:  # ValueError: keys and lengths of two sizes
            logger.info("node %s: replicas for %s: %s", self._name, peer, error)
        finally:
            self._pulls -= 1
            connection.send(m.Done(request.id, count))

    def _space(self, number: int) -> Space:
        """Raises PoolRefused."""
        if number not in self._namespaces:
            raise PoolRefused(f"there is no namespace number {number} any more")
        namespace = self._namespaces[number]
        return namespace.name, namespace.geometry, namespace.generation
