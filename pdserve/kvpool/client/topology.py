"""The nodes of the pool as a client knows them now, each with its link. Thread-safe.

Views come from every connection, and routing.py chooses the valid one. A new view makes links to new nodes.
Links to nodes that left end together with their last operation. While a node is down, the thread that tries
to reach it asks the other nodes for their views. So a client with idle connections also learns the new owners
of its pages.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from pdserve.errors import PoolError, PoolTimeout, PoolUnavailable
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.client.connection_pool import NodeLink, OpenConnection
from pdserve.kvpool.client.deadline import Deadline
from pdserve.kvpool.client.routing import Rings, ViewBook
from pdserve.kvpool.protocol.cluster_messages import GetView, View
from pdserve.kvpool.protocol.messages import NodeAddress, Welcome
from pdserve.kvpool.transports.base import Connection, Connector

logger = logging.getLogger(__name__)

CONNECTIONS: Final = 4
"""Operations of one client on one node at a time."""


class SharedViews:
    """A `ViewBook` that several threads, or two clients of one process, write to."""

    def __init__(self, config: PoolClientConfig) -> None:
        """Raises ConfigError if the nodes form no valid ring."""
        self._book = ViewBook([NodeAddress(ref.node, ref.address, ref.weight) for ref in config.nodes])
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []

    @property
    def rings(self) -> Rings:
        """The view that counts."""
        return self._book.rings

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every change, on the thread that made the change."""
        self._listeners.append(listener)

    def on_view(self, welcome: Welcome, view: View | Welcome) -> None:
        """The node of `welcome` sent its view."""
        with self._lock:
            changed = self._book.on_view(welcome.node, welcome.incarnation, view)
        self._tell(changed)

    def on_unreachable(self, node: str) -> None:
        """The node cannot be reached."""
        with self._lock:
            changed = self._book.on_unreachable(node)
        self._tell(changed)

    def _tell(self, changed: bool) -> None:
        if changed:
            rings = self.rings
            names = ", ".join(node.node for node in rings.ring.nodes)
            logger.info("the pool's ring is now of epoch %d: %s", rings.epoch, names)
            for listener in self._listeners:
                listener()


class PoolLinks:
    """One namespace's links to all nodes."""

    def __init__(
        self,
        config: PoolClientConfig,
        namespace: str,
        geometry: dict[str, str],
        connector: Connector,
        views: SharedViews,
        page_bytes: int = 0,
        connections: int = CONNECTIONS,
    ) -> None:
        self._config = config
        self._namespace = namespace
        self._geometry = geometry
        self._connector = connector
        self._views = views
        self._page_bytes = page_bytes
        self._connections = connections
        self._seeds = {ref.node: ref.address for ref in config.nodes}
        self._lock = threading.Lock()
        self._asking = threading.Lock()  # held by the one thread that asks for views
        self._links: dict[str, NodeLink] = {}  # replaced as a whole
        self._closed = False
        self._follow()
        views.subscribe(self._follow)

    @property
    def rings(self) -> Rings:
        """The view that counts."""
        return self._views.rings

    @property
    def links(self) -> dict[str, NodeLink]:
        """The links by node: a snapshot."""
        return self._links

    def link(self, node: str) -> NodeLink:
        """The link to a node. Raises PoolUnavailable if the node left."""
        link = self._links.get(node)
        if link is None:
            raise PoolUnavailable(f"pool node {node} has left the pool")
        return link

    def close(self) -> None:
        """Close all links; idempotent."""
        with self._lock:
            self._closed = True
            links = self._links
        for link in links.values():
            link.close()

    def ask_view(self, opened: OpenConnection, deadline: float) -> None:
        """Ask one node for its view. Raises PoolError."""
        reply = opened.call(GetView(opened.next_id()), deadline)
        if isinstance(reply, View):
            self._views.on_view(opened.connection.welcome, reply)

    # --- following the view

    def _follow(self) -> None:
        """Bring the links in line with the view."""
        with self._lock:
            wanted = self.rings.reachable_at(self._seeds)
            before = self._links
            if not self._closed:
                self._links = {node: before.get(node) or self._make_link(node) for node in wanted}
            gone = [link for node, link in before.items() if node not in self._links]
        for link in gone:
            link.close()

    def _make_link(self, node: str) -> NodeLink:
        config = self._config
        return NodeLink(
            node,
            lambda deadline: self._connect(node, deadline),
            namespace=self._namespace,
            geometry=self._geometry,
            page_bytes=self._page_bytes,
            limit=self._connections,
            connect_timeout_s=config.connect_timeout_s,
            retry_after_s=config.retry_after_s,
            restart_wait_s=config.restart_wait_s,
            on_lost=self._lost,
        )

    def _connect(self, node: str, deadline: float) -> Connection:
        addresses = self.rings.reachable_at(self._seeds).get(node, [])
        for address in addresses[:-1]:
            try:
                return self._greeted(node, address, (time.monotonic() + deadline) / 2)
            except (PoolUnavailable, PoolTimeout) as error:
                logger.debug("pool node %s: %s", node, error)
        if not addresses:
            raise PoolUnavailable(f"pool node {node} has left the pool")
        return self._greeted(node, addresses[-1], deadline)

    def _greeted(self, node: str, address: str, deadline: float) -> Connection:
        connection = self._connector.connect(address, deadline, self._views.on_view)
        welcome = connection.welcome
        if welcome.epoch > 0 and welcome.node != node:
            connection.close()
            raise PoolUnavailable(f"pool node {node}: {welcome.node} is at {address} now")
        self._views.on_view(welcome, welcome)
        return connection

    def _lost(self, node: str) -> None:
        """Called repeatedly by the link's thread while the node is down."""
        self._views.on_unreachable(node)
        if self.rings.epoch > 0 and self._asking.acquire(blocking=False):
            try:
                self._ask_around(node)
            finally:
                self._asking.release()

    def _ask_around(self, lost: str) -> None:
        """Ask the other nodes for their view until one answers; if none does, ask the seeds."""
        timeout_s = self._config.exists_timeout_s
        for node, link in self._links.items():
            if node != lost and link.up:
                deadline = Deadline(time.monotonic() + timeout_s)
                try:
                    link.use(deadline, lambda opened, until=deadline: self.ask_view(opened, until.at_s))  # type: ignore[misc]
                    return
                except PoolError as error:
                    logger.debug("pool node %s: %s", node, error)
        for node, address in self._seeds.items():
            if node not in self._links and not self._closed:
                try:
                    connection = self._connector.connect(address, time.monotonic() + timeout_s)
                except PoolError as error:
                    logger.debug("pool node %s: %s", node, error)
                    self._views.on_unreachable(node)
                else:
                    self._views.on_view(connection.welcome, connection.welcome)
                    connection.close()
