"""A node's part in the pool: what it knows of the others, and who is told. asyncio, in the node's loop.

The decisions are `Cluster`'s (membership.py). Here a change goes where it is needed: clients that asked for
views get the new one, the node's own parts are called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from msgspec.structs import replace

from pdserve.kvpool import messages as m
from pdserve.kvpool.cluster_messages import GetView, NamespaceRecord, View
from pdserve.kvpool.config import PoolNodeConfig
from pdserve.kvpool.connection import ClientConnection
from pdserve.kvpool.membership import Cluster, Update
from pdserve.kvpool.wire import NodeAddress

logger = logging.getLogger(__name__)

Handler: TypeAlias = Callable[[ClientConnection, Any], None]
MAX_UNREAD_VIEW_BYTES: Final = 256 * 1024  # a client that has not read so much gets the view later


class Gossiper:
    """This node among the others.

    `on_view` and `on_namespaces` are called with what changed, in the loop, and may call back. Whoever moves
    pages sets `moves_pages` before the node starts, and calls `settle(epoch)` when this node has all that it
    owns; else the node counts as settled at once.
    """

    def __init__(
        self,
        config: PoolNodeConfig,
        incarnation: int,
        started_s: int,
        connections: Mapping[int, ClientConnection],
    ) -> None:
        """`started_s`: the clock's second. `connections`: the node's clients."""
        self.config = config
        self.cluster = Cluster(
            config.cluster.name,
            NodeAddress(config.name, config.address, config.weight),
            incarnation,
            started_s,
        )
        self.moves_pages = False
        self.on_view: list[Callable[[View], None]] = []
        self.on_change: list[Callable[[], None]] = []  # any change of what is known of the members
        self.on_namespaces: list[Callable[[list[NamespaceRecord]], None]] = []
        self._connections = connections
        self._unaware: set[int] = set()  # connections that have yet to be told the newest view
        self.apply(Update())

    @property
    def view(self) -> View:
        """The ring as this node knows it."""
        return self.cluster.view

    def routes(self) -> dict[type, Handler]:
        """Who answers which request."""
        return {GetView: self._get_view}

    def settle(self, epoch: int) -> None:
        """This node has pulled all that it owns under the ring of `epoch`."""
        self.apply(self.cluster.settle(epoch))

    def leave(self) -> None:
        """Stop owning pages; LEFT when the others have them. Raises PoolRefused: there is no other."""
        self.apply(self.cluster.leave())

    def publish(self, record: NamespaceRecord) -> None:
        """Tell all nodes of a namespace's new record."""
        self.apply(self.cluster.publish(record))

    def apply(self, update: Update) -> None:
        """Carry a change where it is needed."""
        if update.view is not None:
            self._view_changed()
        if update.namespaces:
            for told in self.on_namespaces:
                told(list(update.namespaces))
        if update.members or update.view is not None:
            for changed in self.on_change:
                changed()
        if not self.moves_pages and self.cluster.me.settled < self.cluster.epoch:
            self.settle(self.cluster.epoch)

    # --- views

    def _view_changed(self) -> None:
        view = self.view
        logger.info(
            "node %s: epoch %d: %s", self.config.name, view.epoch, ", ".join(n.node for n in view.nodes)
        )
        self._unaware = {
            number
            for number, connection in self._connections.items()
            if connection.hello is not None and connection.hello.views
        }
        self.push_views()
        for told in self.on_view:
            told(view)

    def push_views(self) -> None:
        """Tell the clients that lack the newest view; one that reads too slowly is told at the next call."""
        for number in list(self._unaware):
            connection = self._connections.get(number)
            if connection is None or connection.unread_bytes <= MAX_UNREAD_VIEW_BYTES:
                self._unaware.discard(number)
                if connection is not None:
                    connection.send(self.view)

    def _get_view(self, connection: ClientConnection, request: GetView) -> None:
        connection.send(View(request.id, self.view.epoch, self.view.nodes, self.view.previous))

    def with_members(self, report: m.StatusReport) -> m.StatusReport:
        """The node's status with what it knows of the others."""
        return replace(report, epoch=self.cluster.epoch, members=list(self.cluster.state.members))
