"""A node's data paths to clients that do not map its memory: UCX and TCP. asyncio."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import groupby
from operator import attrgetter
from typing import TypeAlias

from pdserve.errors import PdserveError
from pdserve.extras import is_installed
from pdserve.kvpool.core.events import (
    Event,
    TransferAction,
    TransferDone,
    TransfersDone,
    failures,
)
from pdserve.kvpool.node.config import PoolNodeConfig
from pdserve.kvpool.node.tcp.server import TcpServer
from pdserve.kvpool.node.ucx.server import UcxServer
from pdserve.kvpool.protocol.address import TcpAddress, is_remote, parse_address
from pdserve.kvpool.protocol.messages import DataPathName, Fault, Hello, TcpInfo, UcxInfo
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.security.tls import Certificates

logger = logging.getLogger(__name__)

DataPathInfo: TypeAlias = UcxInfo | TcpInfo


class DataPaths:
    """The data connections of all clients. `memory`: the arena, uint8, shape [arena_bytes].

    `feed` is called with events. `lost` is called with a connection whose data path failed, and the reason.
    """

    def __init__(
        self,
        config: PoolNodeConfig,
        certificates: Certificates,
        memory: Bytes1D,
        feed: Callable[[Event], None],
        lost: Callable[[int, str], None],
    ) -> None:
        self._config = config
        self._feed = feed
        self.ucx = UcxServer(
            memory,
            self._ended,
            lost,
            port=config.ucx.port,
            options=config.ucx.settings,
            stall_timeout_s=config.lease_s,
        )
        self.tcp = TcpServer(
            memory,
            self._ended,
            lost,
            hosts=_hosts(config.listen),
            port=config.tcp.port,
            tls=lambda: certificates.server_context,
            stall_timeout_s=config.lease_s,
        )
        self._tcp_problem: str | None = "it has not been started"
        self._paths: dict[int, DataPathName] = {}  # of the connections that have a data path here
        self.queued: list[TransferAction] = []

    def prepare(self, *, ucx_was_used: bool) -> None:
        """The node is ready. What other hosts will need is made ready at once."""
        remote = any(is_remote(address) for address in self._config.listen)
        if self._config.tcp.enabled and (remote or self._config.tcp.port):
            self._start_tcp()
        if self._config.ucx.enabled and is_installed("ucx"):
            self.ucx.prepare(at_once=(remote and self._config.ucx.trusted_network) or ucx_was_used)

    async def open(self, connection: int, hello: Hello, path: DataPathName) -> DataPathInfo | Fault:
        """Prepare for a client's data connection. `close` undoes it."""
        self._paths[connection] = path
        try:
            if path == "ucx":
                return await self.ucx.open(connection)
            if self._tcp_problem is not None:
                self._start_tcp()
            if self._tcp_problem is None:
                return self.tcp.open(connection)
            problem = self._tcp_problem
        except PdserveError as error:
            problem = str(error)
            logger.warning("node %s: no %s for client %s: %s", self._config.name, path, hello.client, error)
        means = "UCX" if path == "ucx" else "TCP for pages"
        return Fault(0, "data_path", f"node {self._config.name} cannot use {means}: {problem}")

    def close(self, connection: int) -> None:
        """The client has disconnected, or will be. Idempotent."""
        self._paths.pop(connection, None)
        self.ucx.close(connection)  # also when `open` returns after the client has gone
        self.tcp.close(connection)

    def perform(self, action: TransferAction) -> None:
        """An action for a client that has a data connection, or had one. `flush` carries it out."""
        self.queued.append(action)

    def flush(self) -> None:
        """Have the threads carry out what is queued: before an answer is sent, since a client may begin to
        send as soon as it has it.
        """
        queued, self.queued = self.queued, []
        for connection, actions in groupby(queued, attrgetter("connection")):
            path, own = self._paths.get(connection), list(actions)
            if path == "ucx":
                self.ucx.perform(connection, own)
            elif path is not None:
                self.tcp.perform(connection, own)
            else:
                asyncio.get_running_loop().call_soon(self._ended, failures(own))

    def _ended(self, done: list[TransferDone]) -> None:
        self._feed(TransfersDone(done))

    def stop(self) -> None:
        """End all data connections. When it returns, nothing touches the arena any more. Idempotent."""
        self.ucx.stop()
        self.tcp.stop()

    def _start_tcp(self) -> None:
        try:
            self.tcp.start()
            self._tcp_problem = None
        except OSError as error:
            where = f"port {self._config.tcp.port}" if self._config.tcp.port else "any port"
            self._tcp_problem = f"it cannot listen at {where}: {error.strerror or error}; set `tcp.port`"
            logger.warning("node %s: no pages over TCP: %s", self._config.name, self._tcp_problem)


def _hosts(listen: list[str]) -> list[str]:
    """Where the control connections come in, clients of Unix sockets by the loopback address."""
    parsed = [parse_address(address) for address in listen]
    return sorted({one.host if isinstance(one, TcpAddress) else "127.0.0.1" for one in parsed})
