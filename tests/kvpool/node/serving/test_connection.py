"""One control connection of a node, on a transport that is a stand-in."""

from __future__ import annotations

import asyncio
from typing import Any

from pdserve.kvpool.node.serving.connection import MAX_UNREAD_BYTES, UNREAD_TIMEOUT_S, ClientConnection
from pdserve.kvpool.protocol.messages import Done, Fault
from tests.support.virtual_time import virtually


class Host:
    """A node that lets everybody in."""

    name = "node"

    def __init__(self) -> None:
        self.strangers = self

    def opened(self, connection: ClientConnection) -> None:
        pass

    def closed(self) -> None:
        pass

    def disconnected(self, number: int, *, by_peer: bool) -> None:
        pass

    def log(self, *words: object) -> None:
        pass


class FullTransport:
    """What is written stays in it until the test takes it out."""

    def __init__(self) -> None:
        self.unread_bytes = 0
        self.aborted = False
        self.reads = True

    def get_extra_info(self, name: str) -> Any:
        return None

    def is_closing(self) -> bool:
        return self.aborted

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return self.unread_bytes

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def write(self, data: bytes) -> None:
        if self.aborted:
            raise RuntimeError("unable to perform operation: the handler is closed")
        self.unread_bytes += len(data)

    def abort(self) -> None:
        self.aborted = True


async def test_an_answer_that_comes_when_the_client_is_gone_is_dropped() -> None:
    """uvloop's transport refuses to write then."""
    transport, connection = FullTransport(), ClientConnection(Host(), 1)  # type: ignore[arg-type]
    connection.connection_made(transport)  # type: ignore[arg-type]
    transport.abort()
    connection.send(Done(1))


@virtually
async def test_who_reads_nothing_is_closed_and_who_reads_a_little_is_not() -> None:
    transport, connection = FullTransport(), ClientConnection(Host(), 1)  # type: ignore[arg-type]
    connection.connection_made(transport)  # type: ignore[arg-type]
    connection._end_timer.cancel()  # it has shaken hands
    transport.unread_bytes = 1000
    connection.pause_writing()
    for _ in range(5):
        await asyncio.sleep(UNREAD_TIMEOUT_S * 0.9)
        transport.unread_bytes -= 1
        assert (transport.reads, transport.aborted) == (False, False)
    await asyncio.sleep(UNREAD_TIMEOUT_S * 2)
    assert transport.aborted


@virtually
async def test_who_has_not_read_many_replies_is_closed_also_where_it_asked_for_them_before() -> None:
    transport, connection = FullTransport(), ClientConnection(Host(), 1)  # type: ignore[arg-type]
    connection.connection_made(transport)  # type: ignore[arg-type]
    while not transport.aborted:
        assert transport.unread_bytes <= MAX_UNREAD_BYTES
        connection.send(Fault(0, "upgrading", "x" * (1 << 20)))
    connection.connection_lost(None)


@virtually
async def test_a_client_that_reads_again_is_read_again_unless_it_waits_for_another_reason() -> None:
    transport, connection = FullTransport(), ClientConnection(Host(), 1)  # type: ignore[arg-type]
    connection.connection_made(transport)  # type: ignore[arg-type]
    connection._end_timer.cancel()
    connection.pause_writing()
    connection.pause()
    connection.resume_writing()
    await asyncio.sleep(2 * UNREAD_TIMEOUT_S)
    assert not transport.reads
    connection.pause_writing()
    connection.resume()
    await asyncio.sleep(0)
    assert not transport.reads
    connection.resume_writing()
    await asyncio.sleep(0)
    assert transport.reads
    await asyncio.sleep(2 * UNREAD_TIMEOUT_S)
    assert not transport.aborted
