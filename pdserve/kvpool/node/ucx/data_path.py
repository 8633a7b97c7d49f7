"""A node's UCX data path: one endpoint per client. asyncio.

UCX takes 0.6 s to load, in a thread; on a slow machine this is more than a client waits for. A node that
other hosts can reach loads it at once. A node that only its own host can reach seldom needs it (for a client
in another container, say). It loads the library a while after its start, when first reads have been answered,
and makes the rest ready when such a client connects.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Final

from pdserve.errors import PdserveError
from pdserve.kvpool.core.events import CancelTransfers, Event, StartReceive, StartSend
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.kvpool.node.ucx.server import UcxServer
from pdserve.kvpool.protocol.messages import Fault, Hello, UcxInfo
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.kvpool.transports.ucx import UcxLibrary

logger = logging.getLogger(__name__)

LIBRARY_AFTER_S: Final = 5.0


class UcxPath:
    """All UCX endpoints of a node. `memory`: the arena, uint8, shape [arena_bytes].

    `feed` is called with events. `lost` is called with a connection whose endpoint failed, and the reason.
    """

    def __init__(
        self,
        config: PoolNodeConfig,
        memory: Bytes1D,
        feed: Callable[[Event], None],
        lost: Callable[[int, str], None],
    ) -> None:
        self._config = config
        self._memory = memory
        self._feed = feed
        self._lost = lost
        self.server: UcxServer | None = None
        self._loading: asyncio.Task[UcxServer] | None = None
        self._library: asyncio.Handle | None = None

    def prepare(self, *, at_once: bool) -> None:
        """The node is ready. `at_once`: load UCX now, for clients on other hosts or after an upgrade."""
        if at_once:
            self.load()
        else:
            thread = threading.Thread(target=self._load_library, daemon=True)
            self._library = asyncio.get_running_loop().call_later(LIBRARY_AFTER_S, thread.start)

    def _load_library(self) -> None:
        try:
            UcxLibrary().context(self._config.ucx.settings)
        except PdserveError as error:  # a client that needs UCX gets the reason
            logger.info("node %s: %s", self._config.name, error)

    def load(self) -> asyncio.Task[UcxServer]:
        """Load UCX, unless the loading has begun already."""
        if self._loading is None:
            self._loading = asyncio.get_running_loop().create_task(self._start())
            self._loading.add_done_callback(self._loaded)
        return self._loading

    async def open(self, connection: int, hello: Hello) -> UcxInfo | Fault:
        """Prepare for a client's endpoint. `close` undoes it."""
        try:
            server = await asyncio.shield(self.load())
            return await server.open(connection)
        except PdserveError as error:
            logger.warning("node %s: no UCX for client %s: %s", self._config.name, hello.client, error)
            return Fault(0, "data_path", f"node {self._config.name} cannot use UCX: {error}")

    def close(self, connection: int) -> None:
        """The client has disconnected."""
        if self.server is not None:
            self.server.close(connection)

    def perform(self, action: StartSend | StartReceive | CancelTransfers) -> None:
        """Carry out an action for a client that has an endpoint."""
        assert self.server is not None
        self.server.perform(action)

    def stop(self) -> None:
        """End all connections. Idempotent."""
        if self._library is not None:
            self._library.cancel()
        if self._loading is not None:
            self._loading.cancel()
        if self.server is not None:
            self.server.stop()

    async def _start(self) -> UcxServer:
        ucx = self._config.ucx
        self.server = UcxServer(
            self._memory,
            self._feed,
            self._lost,
            port=ucx.port,
            options=ucx.settings,
            stall_timeout_s=self._config.lease_s,
        )
        await self.server.start()
        return self.server

    def _loaded(self, loading: asyncio.Task[UcxServer]) -> None:
        error = None if loading.cancelled() else loading.exception()
        if error is not None:
            logger.warning("node %s: clients on other hosts cannot be served: %s", self._config.name, error)
