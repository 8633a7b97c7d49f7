"""Between routers and a real Redis: passes on what Redis answers late, not at all, or changed, as a test
says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path


class SlowRedis:
    """A Unix socket that leads to a Redis. What is set counts from the next bytes on."""

    def __init__(self, path: Path) -> None:
        self.url = f"unix://{path}"
        self.delay_s = 0.0
        """Of each answer."""
        self.alter: Callable[[bytes], bytes] = lambda data: data
        """What becomes of an answer."""
        self.answers = 0
        self.connections = 0
        self.writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """Every connection ends."""
        for writer in self.writers:
            writer.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                if is_answer and self.delay_s:
                    await asyncio.sleep(self.delay_s)  # the slowness that is tested, not a wait for something
                writer.write(self.alter(data) if is_answer else data)
                self.answers += is_answer
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def slow_redis(directory: Path, behind: str) -> AsyncIterator[SlowRedis]:
    """Before the Redis of that URL, which may still be starting."""
    path = directory / "slow.sock"
    between = SlowRedis(path)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_unix_connection(behind.removeprefix("unix://"))
        except OSError:
            writer.close()
            return
        between.connections += 1
        ends = {writer, there[1]}
        between.writers |= ends
        try:
            await asyncio.gather(
                between._pump(reader, there[1], is_answer=False),
                between._pump(there[0], writer, is_answer=True),
            )
        finally:
            between.writers -= ends
            for end in ends:
                with suppress(OSError):
                    end.close()

    served: set[asyncio.Task[None]] = set()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve(reader, writer))
        served.add(task)
        task.add_done_callback(served.discard)

    server = await asyncio.start_unix_server(accepted, path)
    try:
        yield between
    finally:
        server.close()
        for task in served:
            task.cancel()
        await asyncio.gather(*served, return_exceptions=True)
