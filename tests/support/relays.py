"""The way from clients to a node, which can be cut: a TCP relay for control connections.

Page bytes do not pass here: mapped memory needs no way, and UCX makes its own connection, which the node ends
when it finds the control connection gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, TypeAlias

Mode: TypeAlias = Literal["open", "hang_up", "silence"]
READ_BYTES: Final = 64 * 1024
CALL_TIMEOUT_S: Final = 10.0


class Relay:
    """One node's. Lives in the event loop of `relays`; `set_mode` may be called from any thread."""

    def __init__(self, target: tuple[str, int], loop: asyncio.AbstractEventLoop) -> None:
        self._target = target
        self._loop = loop
        self._mode: Mode = "open"
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def address(self) -> str:
        return f"tcp:127.0.0.1:{self.port}"

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def set_mode(self, mode: Mode) -> None:
        """`hang_up` closes what is open, and what comes; `silence` lets nothing through, and forgets
        nothing."""
        asyncio.run_coroutine_threadsafe(self._set_mode(mode), self._loop).result(CALL_TIMEOUT_S)

    async def _set_mode(self, mode: Mode) -> None:
        self._mode = mode
        if mode == "hang_up":
            self._hang_up()
        if mode == "silence":
            self._flows.clear()
        else:
            self._flows.set()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._hang_up()
        self._flows.set()

    def _hang_up(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._mode == "hang_up":
            writer.transport.abort()
            return
        self._writers.add(writer)
        onward: asyncio.StreamWriter | None = None
        try:
            back, onward = await asyncio.open_connection(*self._target)
            self._writers.add(onward)
            ways = {
                asyncio.ensure_future(self._pump(reader, onward)),
                asyncio.ensure_future(self._pump(back, writer)),
            }
            _, other = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for task in other:
                task.cancel()
        except OSError:
            pass  # the node is not there: the client is told by the end of its connection
        finally:
            for each in (writer, onward):
                if each is not None:
                    self._writers.discard(each)
                    each.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(READ_BYTES):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()


@contextmanager
def relays(targets: list[tuple[str, int]]) -> Iterator[list[Relay]]:
    """One relay for each target (host, port), in a thread of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="chaos-relays", daemon=True)
    thread.start()

    def run(work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(CALL_TIMEOUT_S)

    made = [Relay(target, loop) for target in targets]
    try:
        for relay in made:
            run(relay.listen())
        yield made
    finally:
        for relay in made:
            run(relay.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(CALL_TIMEOUT_S)
