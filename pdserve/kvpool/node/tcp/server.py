"""The node's end of the TCP data path: carries out StartSend, StartReceive and CancelTransfers.

    node.py       open(connection) -> TcpInfo, sent in Welcome     close(connection) when control is gone
                  perform(action)                                  on_done([...])  on_lost(connection)

It offers what UcxServer offers. A client's pages go over a data connection of its own, beside its control
connection, and a thread of the node moves them (`page_worker.py`). The event loop only decides, so it is not
slower for others while pages move; the kernel shares processors and network among the connections.

Every method is called on the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from pdserve.errors import PoolUnavailable
from pdserve.kvpool.core.events import StartSend, TransferAction, TransferDone, failures
from pdserve.kvpool.node.tcp.listener import GREETING_TIMEOUT_S, DataListener
from pdserve.kvpool.node.tcp.page_worker import PageWorker
from pdserve.kvpool.protocol.messages import TcpInfo
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.kvpool.transports.page_residency import populate_in_background
from pdserve.kvpool.transports.tcp.stream import TICKET_BYTES, PageStream

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S: Final = 5.0  # for the threads to let go of the memory: each is in one call to the kernel

AT_ONCE_BYTES: Final = 128 * 1024
"""Of pages that the loop sends itself: the kernel copies them within 50 µs."""


class _Peer:
    """One client. `claimed`: its data connection has come."""

    def __init__(self, connection: int, worker: PageWorker) -> None:
        self.connection = connection
        self.worker = worker
        self.claimed = False


class TcpServer:
    """All data connections of a node."""

    def __init__(
        self,
        arena: Bytes1D,
        on_done: Callable[[list[TransferDone]], None],
        on_lost: Callable[[int, str], None],
        *,
        hosts: Sequence[str],
        port: int = 0,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
        stall_timeout_s: float = 30.0,
    ) -> None:
        """The arguments:

        - `on_done`: told once of each StartSend and StartReceive, from the loop and never within `perform`.
        - `on_lost(connection, reason)`: the data connection ended; the control connection should be closed.
        - `hosts`, `port`: where to listen (port 0: any).
        - `tls`: called for each connection; pages are encrypted by it, if there is one.
        - `stall_timeout_s`: a send, or the rest of a cancelled page, that takes longer ends its connection.
        """
        self._arena = arena
        self._on_done = on_done
        self._on_lost = on_lost
        self._hosts = hosts
        self._port = port
        self._tls = tls
        self._stall_timeout_s = stall_timeout_s
        self._peers: dict[int, _Peer] = {}
        self._tickets: dict[bytes, _Peer] = {}
        self._lock = threading.Lock()  # of `_tickets` and of the peers' `claimed`
        self._listener = DataListener(self._claim, lambda: bool(self._tickets), tls)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False

    def start(self) -> None:
        """Listen. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._port = self._listener.open(self._hosts, self._port)
        self._loop = loop
        populate_in_background(self._arena)

    def stop(self) -> None:
        """End all connections. When it returns, nothing touches the arena any more. Idempotent."""
        if self._stopped or self._loop is None:
            return
        self._stopped = True
        for connection in list(self._peers):
            self.close(connection)
        self._listener.close(time.monotonic() + STOP_TIMEOUT_S)

    def open(self, connection: int) -> TcpInfo:
        """Expect one client's data connection, after `start`. Raises PoolUnavailable (no descriptors)."""
        assert self._loop is not None
        if self._stopped:
            raise PoolUnavailable("the node stops")
        try:
            worker = PageWorker(connection, self._arena.data, self._stall_timeout_s, self._tell)
        except OSError as error:
            raise PoolUnavailable(f"no data connection can be made: {error}") from error
        peer = self._peers[connection] = _Peer(connection, worker)
        ticket = secrets.token_bytes(TICKET_BYTES)
        with self._lock:
            self._tickets[ticket] = peer
        self._loop.call_later(GREETING_TIMEOUT_S, self._expire, ticket)
        return TcpInfo("", self._port, ticket, self._tls() is not None)

    def close(self, connection: int) -> None:
        """End the transfers of a client that disconnected or will be disconnected. Idempotent."""
        peer = self._peers.pop(connection, None)
        if peer is None:
            return
        with self._lock:
            for ticket in [ticket for ticket, one in self._tickets.items() if one is peer]:
                del self._tickets[ticket]
            claimed = peer.claimed
        if claimed:
            peer.worker.stop()
        else:
            peer.worker.discard()

    def perform(self, connection: int, actions: Sequence[TransferAction]) -> None:
        """Carry out actions of NodeState for one connection."""
        assert self._loop is not None
        peer = self._peers.get(connection)
        if peer is not None and not peer.claimed:
            self._lose(peer, "a transfer before the data connection came")
            peer = None
        sends = [action for action in actions if isinstance(action, StartSend)]
        is_short = len(sends) == len(actions) and sum(map(_size_bytes, sends)) <= AT_ONCE_BYTES
        if peer is not None and is_short and (done := peer.worker.send_at_once(sends)) is not None:
            if done:
                self._loop.call_soon(self._on_done, done)
        elif peer is None or not peer.worker.give(*actions):
            self._loop.call_soon(self._on_done, failures(actions))

    def _expire(self, ticket: bytes) -> None:
        with self._lock:
            peer = self._tickets.pop(ticket, None)
        if peer is not None:
            self._lose(peer, "no data connection came")

    def _lose(self, peer: _Peer, reason: str) -> None:
        logger.info("connection %d: TCP: %s", peer.connection, reason)
        self.close(peer.connection)
        assert self._loop is not None
        self._loop.call_soon(self._on_lost, peer.connection, reason)

    def _ended(self, peer: _Peer, reason: str) -> None:
        """The peer's thread ends: unless we closed it, the client is to connect again."""
        if self._peers.get(peer.connection) is peer:
            self._lose(peer, reason)

    # -- called by the connections' threads

    def _claim(self, ticket: bytes) -> Callable[[PageStream], None] | None:
        """A socket shows this ticket. All are compared, so that the time says nothing about them."""
        with self._lock:
            found = [known for known in self._tickets if hmac.compare_digest(known, ticket)]
            if not found:
                return None
            peer = self._tickets.pop(found[0])
            peer.claimed = True
        return lambda stream: self._move(peer, stream)

    def _move(self, peer: _Peer, stream: PageStream) -> None:
        reason = "its thread failed"
        try:
            reason = peer.worker.run(stream)
        finally:
            self._call(self._ended, peer, reason)

    def _tell(self, done: list[TransferDone]) -> None:
        self._call(self._on_done, done)

    def _call(self, *call: object) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: the node has ended
            self._loop.call_soon_threadsafe(*call)  # type: ignore[arg-type]


def _size_bytes(action: StartSend) -> int:
    return sum(action.segment_bytes)
