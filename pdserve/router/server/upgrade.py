"""A client's connection that is no HTTP any more: its bytes go both ways until one side ends it.

`ClientConnection` hands the connection over when a head asks for it, and another protocol has it from then
on. So a connection of HTTP pays nothing for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol

from pdserve.router.server.client import Headers

PIECE_BYTES: Final = 64 * 1024
"""Read at a time, and about as much is held for an end that reads slowly."""


class Upgraded:
    """A connection, and the head that it began with."""

    def __init__(self, transport: Any, target: bytes, headers: Headers, address: str) -> None:
        """`transport`: asyncio's, of the connection."""
        self.target = target
        self.headers = headers
        self.address = address
        """The client's IP address, or its proxy's."""
        self.reader = asyncio.StreamReader(PIECE_BYTES)
        self._transport = transport

    def adopt(self, rest: bytes, on_lost: Callable[[], object]) -> None:
        """Take the connection over. `rest`: what has been read behind the head."""
        protocol = _Adopted(self.reader, on_lost)
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        if rest:
            protocol.data_received(rest)
        self.writer = asyncio.StreamWriter(self._transport, protocol, self.reader, asyncio.get_running_loop())


class UpgradeHandler(Protocol):
    """Serves connections that are no HTTP any more."""

    def takes(self, target: bytes) -> bool:
        """Whether they may begin with this request target."""
        ...

    async def serve(self, client: Upgraded) -> None:
        """Answer the head, serve the connection, and close it."""
        ...


class _Adopted(asyncio.StreamReaderProtocol):
    def __init__(self, reader: asyncio.StreamReader, on_lost: Callable[[], object]) -> None:
        super().__init__(reader)
        self._on_lost = on_lost

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_lost()
