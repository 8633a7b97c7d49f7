"""The node's end of the TCP data path alone, on an event loop of its own, and raw sockets of its peers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import numpy as np

from pdserve.kvpool.core.events import FIRST_TAG, CancelTransfers, StartReceive, StartSend, TransferDone
from pdserve.kvpool.node.tcp.server import TcpServer
from pdserve.kvpool.protocol.messages import TcpInfo
from pdserve.kvpool.transports.tcp.stream import GREETED_TAG, HEADER

T = TypeVar("T")
PATIENCE_S: Final = 20.0
ARENA_BYTES: Final = 64 << 20
REUSED: Final = 0xEE


class RunningServer:
    """A TcpServer, what it reported, and its arena."""

    def __init__(self, stall_timeout_s: float, tls: ssl.SSLContext | None) -> None:
        self.arena = np.zeros(ARENA_BYTES, np.uint8)
        self.done: dict[int, bool] = {}  # tag -> ok
        self.lost: dict[int, str] = {}  # connection -> reason
        self.slots: dict[int, tuple[int, int]] = {}  # tag -> offset and length, of every receive
        self.reuses_slots = (
            False  # a slot is filled with REUSED as soon as its receive was reported as failed
        )
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.server = TcpServer(
            self.arena,
            self._on_done,
            self._on_lost,
            hosts=["127.0.0.1"],
            tls=lambda: tls,
            stall_timeout_s=stall_timeout_s,
        )
        self.do(self.server.start)
        self._connections = 0
        self._next_tag = FIRST_TAG

    def do(self, work: Callable[[], T]) -> T:
        """On the loop's thread."""

        async def run() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(PATIENCE_S)

    def _on_done(self, done: list[TransferDone]) -> None:
        with self._changed:
            for one in done:
                assert one.tag not in self.done, "reported twice"
                self.done[one.tag] = one.ok
                if self.reuses_slots and one.tag in self.slots and not one.ok:
                    offset, length = self.slots[one.tag]
                    self.arena[offset : offset + length] = REUSED
            self._changed.notify_all()

    def _on_lost(self, connection: int, reason: str) -> None:
        with self._changed:
            self.lost[connection] = reason
            self._changed.notify_all()

    def outcome(self, tag: int) -> bool:
        """Of a transfer, when it has ended."""
        with self._changed:
            assert self._changed.wait_for(lambda: tag in self.done, PATIENCE_S), f"transfer {tag} never ended"
            return self.done[tag]

    def reason(self, connection: int) -> str:
        """Why the connection was lost, when it is."""
        with self._changed:
            assert self._changed.wait_for(lambda: connection in self.lost, PATIENCE_S), "it was not lost"
            return self.lost[connection]

    def expect_client(self) -> tuple[int, TcpInfo]:
        self._connections += 1
        connection = self._connections
        return connection, self.do(lambda: self.server.open(connection))

    def receive(self, connection: int, offset: int, length: int) -> int:
        """Its tag."""
        tag, self._next_tag = self._next_tag, self._next_tag + 1
        self.slots[tag] = (offset, length)
        self.do(lambda: self.server.perform(connection, [StartReceive(connection, tag, offset, (length,))]))
        return tag

    def send(self, connection: int, offset: int, length: int) -> int:
        """Its tag."""
        tag, self._next_tag = self._next_tag, self._next_tag + 1
        self.do(lambda: self.server.perform(connection, [StartSend(connection, tag, offset, (length,))]))
        return tag

    def cancel(self, connection: int, *tags: int) -> None:
        self.do(lambda: self.server.perform(connection, [CancelTransfers(connection, tags)]))

    def close(self, connection: int) -> None:
        self.do(lambda: self.server.close(connection))

    def stop(self) -> None:
        self.do(self.server.stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()


@contextlib.contextmanager
def running(stall_timeout_s: float = 30.0, tls: ssl.SSLContext | None = None) -> Iterator[RunningServer]:
    server = RunningServer(stall_timeout_s, tls)
    try:
        yield server
    finally:
        server.stop()


def dial(info: TcpInfo) -> socket.socket:
    """A stranger's socket."""
    sock = socket.create_connection(("127.0.0.1", info.port), PATIENCE_S)
    sock.settimeout(PATIENCE_S)
    return sock


class Peer:
    """A greeted client that does as it likes."""

    def __init__(self, server: RunningServer, tls: ssl.SSLContext | None = None) -> None:
        self.connection, info = server.expect_client()
        self.sock = dial(info)
        if tls is not None:
            self.sock = tls.wrap_socket(self.sock, server_hostname="127.0.0.1")
        self.sock.sendall(info.ticket)
        assert self.header() == (GREETED_TAG, 0)

    def header(self) -> tuple[int, int]:
        tag, length = HEADER.unpack(self.read(HEADER.size))
        return tag, length

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.sock.recv(count - len(data))
            assert piece, "the node closed the connection"
            data += piece
        return data

    def write(self, tag: int, page: bytes, length: int | None = None) -> None:
        """A page, whole or only its beginning."""
        self.sock.sendall(HEADER.pack(tag, len(page) if length is None else length) + page)

    def is_hung_up_on(self) -> bool:
        """Whatever else the node sends before it closes."""
        deadline_s = time.monotonic() + PATIENCE_S
        with contextlib.suppress(ConnectionError):
            while self.sock.recv(1 << 20):
                assert time.monotonic() < deadline_s
        return True

    def close(self) -> None:
        self.sock.close()
