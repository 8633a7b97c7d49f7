"""One address before several routers, on TCP: a balancer as it stands before HTTP services, and no more.

`python -m benchmarks.hosts.balancer PORT HOST:PORT...` asks each router's `/ready` every `CHECK_S`. A new
connection goes to the next one that said 200, or to another where that one cannot be reached. Connections of
a router that was silent in `LOST_CHECKS` checks are cut, since nobody else would. One that refuses new
connections finishes those that it has.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

CHECK_S: Final = 0.25
SILENT_S: Final = 1.0
LOST_CHECKS: Final = 3
READ_BYTES: Final = 1 << 16


class Router:
    """One of those behind the address."""

    def __init__(self, place: str) -> None:
        host, _, port = place.rpartition(":")
        self.place = (host, int(port))
        self.is_ready = False
        self._silent = 0
        """Checks in a row without any answer."""
        self._connections: set[asyncio.StreamWriter] = set()

    async def watch(self) -> None:
        """Ask it again and again."""
        while True:
            try:
                self.is_ready = await self._status() == b"200"
                self._silent = 0
            except TimeoutError:
                self.is_ready = False
                self._silent += 1
            if self._silent == LOST_CHECKS:
                for writer in list(self._connections):
                    writer.transport.abort()
            await asyncio.sleep(CHECK_S)

    async def _status(self) -> bytes:
        """Of its answer; empty where it refuses to. Raises TimeoutError."""
        try:
            async with asyncio.timeout(SILENT_S):
                reader, writer = await asyncio.open_connection(*self.place)
                try:
                    writer.write(b"GET /ready HTTP/1.1\r\nhost: router\r\nconnection: close\r\n\r\n")
                    return (await reader.readline()).split(b" ")[1]
                finally:
                    writer.close()
        except TimeoutError:
            raise
        except (OSError, IndexError):
            return b""

    async def join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Carry one connection until either side ends it; False where the router cannot be reached."""
        try:
            async with asyncio.timeout(SILENT_S):
                far_reader, far_writer = await asyncio.open_connection(*self.place)
        except (OSError, TimeoutError):
            return False
        both = (writer, far_writer)
        self._connections.update(both)
        try:
            ways = [
                asyncio.create_task(_carry(reader, far_writer)),
                asyncio.create_task(_carry(far_reader, writer)),
            ]
            await asyncio.wait(ways)
        finally:
            self._connections.difference_update(both)
            far_writer.close()
        return True


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One way, to its end."""
    with suppress(OSError):
        while data := await reader.read(READ_BYTES):
            writer.write(data)
            await writer.drain()
    with suppress(OSError, RuntimeError):
        writer.write_eof() if writer.can_write_eof() else writer.close()


async def balance(port: int, places: Sequence[str]) -> None:
    """For ever."""
    routers = [Router(place) for place in places]
    turns = itertools.count()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = next(turns) % len(routers)
        order = sorted([*routers[first:], *routers[:first]], key=lambda one: not one.is_ready)
        try:
            for router in order:
                if await router.join(reader, writer):
                    return
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "0.0.0.0", port, backlog=1024)
    async with server, asyncio.TaskGroup() as watching:
        for router in routers:
            watching.create_task(router.watch())


if __name__ == "__main__":
    asyncio.run(balance(int(sys.argv[1]), sys.argv[2:]))
