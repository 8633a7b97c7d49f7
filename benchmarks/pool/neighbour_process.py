"""A process that asks a pool node for pages at a steady rate, answers or not: a neighbour beyond its limit.

Run as `python -m benchmarks.pool.neighbour_process CONFIG.json`. A client that waits for its answers
(load_process.py) asks for no more than it gets. This process sends each request when it is due, on
connections of its own. It releases the pages that it is given and moves no bytes. When the node stops
reading a connection (back-pressure), requests due there are not sent, and the board does not count them.
The process rests while the board says so, with its connections closed: then no request of it waits in the
node. It ends at SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from benchmarks.pool.load_process import GO, MISSED, OPERATIONS, PAGES, REST_S, open_board, run_when_idle
from benchmarks.processes import read_config
from pdserve.errors import PoolUnavailable
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.address import UnixAddress, parse_address
from pdserve.kvpool.protocol.frames import FrameBuffer, decode_reply, encode_frame, expected
from pdserve.kvpool.transports.control import make_hello
from pdserve.kvpool.transports.shm import host_id

CONNECTIONS: Final = 4
TICK_S: Final = 0.005
READ_BYTES: Final = 1 << 16
UNSENT_BYTES: Final = 1 << 16  # of a connection; then the node does not read from it


class AskerConfig(msgspec.Struct, frozen=True):
    """`operations_s`: Gets a second, each of `batch` keys; `row`: its own on the board."""

    name: str
    address: str
    namespace: str
    geometry: dict[str, str]
    board: str
    row: int
    keys: list[bytes]
    page_bytes: int
    batch: int
    operations_s: float


class Asking:
    """One connection, open until it is closed or the node ends it."""

    def __init__(
        self, config: AskerConfig, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._config = config
        self._reader = reader
        self._writer = writer
        self._frames = FrameBuffer()
        self._mine = open_board(config.board)[config.row]
        self._namespace = 0
        self._next = 0
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, config: AskerConfig) -> Asking:
        """Raises OSError, PoolUnavailable."""
        address = parse_address(config.address)
        if not isinstance(address, UnixAddress):
            raise PoolUnavailable(f"{config.address}: an asker maps no other host's memory")
        asking = cls(config, *await asyncio.open_unix_connection(address.path))
        asking.send(make_hello("asker", host_id(), "shm"))
        expected(await asking._reply(), m.Welcome, config.address)
        asking.send(m.OpenNamespace(1, config.namespace, config.geometry))
        asking._namespace = expected(await asking._reply(), m.Opened, config.address).namespace
        asking._reading = asyncio.create_task(asking._read())
        return asking

    def send(self, request: m.Request) -> None:
        self._writer.write(encode_frame(request))

    def ask(self) -> None:
        """One more Get, where the node still reads. Raises PoolUnavailable when it has hung up."""
        if self._reading is None or self._reading.done():
            raise PoolUnavailable(f"{self._config.address} hung up on the neighbour")
        if self._writer.transport.get_write_buffer_size() > UNSENT_BYTES:
            return
        config, first = self._config, self._next
        self._next = (first + config.batch) % (len(config.keys) - config.batch + 1)
        keys = config.keys[first : first + config.batch]
        self.send(m.Get(2 + int(self._mine[OPERATIONS]), self._namespace, keys, [config.page_bytes]))
        self._mine[OPERATIONS] += 1

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        self._writer.transport.abort()

    async def _reply(self) -> m.Reply:
        async for reply in self._replies():
            return reply
        raise PoolUnavailable(f"{self._config.address} hung up")

    async def _read(self) -> None:
        async for reply in self._replies():
            if isinstance(reply, m.Got):
                pins = [pin for pin in reply.pins if pin.status == m.HIT]
                self.send(m.Release([pin.slot for pin in pins], [pin.sequence for pin in pins]))
                self._mine[PAGES] += len(pins)
                self._mine[MISSED] += len(reply.pins) - len(pins)
            else:
                self._mine[MISSED] += self._config.batch

    async def _replies(self) -> AsyncIterator[m.Reply]:
        while data := await self._reader.read(READ_BYTES):
            for body in self._frames.feed(data):
                yield decode_reply(body)


async def _ask(config: AskerConfig) -> None:
    """Ask at the rate, in turn on all connections, until the board says rest."""
    board = open_board(config.board)
    connections: list[Asking] = []
    try:
        for _ in range(CONNECTIONS):
            connections.append(await Asking.open(config))  # noqa: PERF401  (those opened are closed if one fails)
        began_s, due = time.monotonic(), 0
        while board[0, GO]:
            until = int((time.monotonic() - began_s) * config.operations_s)
            for number in range(due, until):
                connections[number % CONNECTIONS].ask()
            due = until
            await asyncio.sleep(TICK_S)
    finally:
        for connection in connections:
            await connection.close()


async def _run(config: AskerConfig) -> None:
    board = open_board(config.board)
    while True:
        if board[0, GO]:
            await _ask(config)
        await asyncio.sleep(REST_S)


def main(config_path: str) -> None:
    config = read_config(config_path, AskerConfig)
    run_when_idle()
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        task = loop.create_task(_run(config))
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)


if __name__ == "__main__":
    main(sys.argv[1])
