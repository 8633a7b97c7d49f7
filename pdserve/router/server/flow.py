"""Back-pressure of one connection: when its client sends faster than it is served, or reads too slowly."""

from __future__ import annotations

import asyncio


class Flow:
    """Both directions of a connection."""

    __slots__ = ("_transport", "_writable", "read_paused", "write_paused")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._writable: asyncio.Event | None = None
        """Somebody waits for it."""
        self.read_paused = False
        self.write_paused = False

    def pause_reading(self) -> None:
        """Take nothing more from the client."""
        if not self.read_paused:
            self.read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Take what the client sends."""
        if self.read_paused:
            self.read_paused = False
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """The client is slow to read."""
        self.write_paused = True

    def resume_writing(self) -> None:
        """The client has read, or has left."""
        self.write_paused = False
        if self._writable is not None:
            self._writable.set()
            self._writable = None

    async def drain(self) -> None:
        """Wait until the client reads, or has left."""
        while self.write_paused:
            if self._writable is None:
                self._writable = asyncio.Event()
            await self._writable.wait()
