"""Pages of other nodes into this node's memory: carries out FetchPages.

A fetch is an ordinary client's read: Get, the bytes, Release. The bytes are checked before the page counts as
here. A node that is being upgraded is waited for, within the fetch's time. Connections are kept, CONNECTIONS
for each node at most; a fetch beyond these waits for one of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from pdserve.errors import PdserveError, PoolRestarting
from pdserve.kvpool.cluster.membership import Cluster
from pdserve.kvpool.core.events import FAILED, Event, FetchPages, PagesFetched
from pdserve.kvpool.namespaces.catalog import Namespaces
from pdserve.kvpool.node.config import PoolNodeConfig
from pdserve.kvpool.node.peers.peer_link import PageMover, PeerLink, Space, address_of, in_thread, space_of
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.security.tls import Certificates

logger = logging.getLogger(__name__)

CONNECTIONS: Final = 4
HOP_S: Final = 1.0
"""How long one request to another node may take beyond `promotion_timeout_s`, and more for a large batch. Who
waits for it gives up a little later."""
SLOWEST_BYTES_S: Final = 20e6
RESTARTING_PAUSE_S: Final = 0.02


@dataclass(slots=True)
class _Peer:
    """The connections to one node: those that no fetch uses, and how many more there may be."""

    idle: list[PeerLink] = field(default_factory=list)
    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CONNECTIONS))


class PageFetcher(PageMover):
    """The fetches of one node. `memory`: its arena, shape [capacity]. `feed` gives events to its state. Lives
    in the node's event loop.
    """

    def __init__(
        self,
        config: PoolNodeConfig,
        certificates: Certificates,
        cluster: Cluster,
        namespaces: Namespaces,
        memory: Bytes1D,
        feed: Callable[[Event], None],
    ) -> None:
        super().__init__()
        self._config = config
        self._certificates = certificates
        self._cluster = cluster
        self._namespaces = namespaces
        self._memory = memory
        self._feed = feed
        self._peers: dict[str, _Peer] = {}

    def fetch(self, fetch: FetchPages) -> None:
        """An action of NodeState."""
        self.start(self._fetch(fetch))

    async def close(self) -> None:
        """As any mover's; idle connections close too."""
        await super().close()
        for peer in self._peers.values():
            while peer.idle:
                peer.idle.pop().close()

    def drop_links(self) -> None:
        """Close the idle connections to nodes that are not alive, or are elsewhere now."""
        for name, peer in self._peers.items():
            for link in [link for link in peer.idle if link.address != address_of(self._cluster, name)]:
                peer.idle.remove(link)
                link.close()

    async def _fetch(self, fetch: FetchPages) -> None:
        count = len(fetch.keys)
        ends, checksums, ages_s = [FAILED] * count, [0] * count, [0.0] * count
        peer = self._peers.setdefault(fetch.node, _Peer())
        try:
            space = space_of(self._namespaces, fetch.namespace)
            timeout_s = self._config.promotion_timeout_s + HOP_S
            deadline_s = time.monotonic() + timeout_s + count * fetch.length_bytes / SLOWEST_BYTES_S
            async with asyncio.timeout(timeout_s):
                await peer.free.acquire()
            try:
                ends, checksums, ages_s = await self._read(peer, fetch, space, deadline_s)
            finally:
                peer.free.release()
        except (PdserveError, TimeoutError) as error:
            logger.info("node %s: fetching pages from %s: %s", self._config.name, fetch.node, error)
        except Exception:  # boundary: this task. The state waits for an answer.
            logger.exception("node %s: fetching pages from %s", self._config.name, fetch.node)
        if not self.closed:
            self._feed(PagesFetched(fetch, bytes(ends), checksums, ages_s))

    async def _read(
        self, peer: _Peer, fetch: FetchPages, space: Space, deadline_s: float
    ) -> tuple[list[int], list[int], list[float]]:
        link = peer.idle.pop() if peer.idle else PeerLink(self._config, self._certificates, fetch.node)
        link.locate(self._cluster)
        slots = [self._memory[offset : offset + fetch.length_bytes] for offset in fetch.offsets]
        try:
            read = await in_thread(lambda: _read(link, space, fetch, slots, deadline_s), fetch.node)
        except asyncio.CancelledError:  # the thread still uses the link
            raise
        except BaseException:
            link.close()  # what state it is in is not known
            raise
        if self.closed:
            link.close()
        else:
            peer.idle.append(link)
        return read


def _read(
    link: PeerLink, space: Space, fetch: FetchPages, slots: list[Bytes1D], deadline_s: float
) -> tuple[list[int], list[int], list[float]]:
    """On a thread. A connection that turns out to be closed, or a node that restarts, is tried again."""
    reused = link.is_open
    while True:
        try:
            return link.read(space, fetch.keys, slots, deadline_s)
        except PdserveError as error:
            link.close()
            restarting = isinstance(error, PoolRestarting)
            if not (restarting or reused) or time.monotonic() >= deadline_s:
                raise
            reused = False
            if restarting:
                time.sleep(RESTARTING_PAUSE_S)
