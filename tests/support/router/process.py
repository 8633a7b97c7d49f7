"""`pdserve router` as a child process of a test."""

from __future__ import annotations

import asyncio
import ctypes
import json
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.router.harness import Connection, Response, chat_body
from tests.support.router.mock_worker import EVENTS

CHAT = "/v1/chat/completions"
PR_SET_PDEATHSIG = 1
PRCTL = ctypes.CDLL(None).prctl


def counted(text: str, name: str) -> float:
    """A metric of an exposition, over all labels."""
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return sum(s.value for s in samples if s.name == name)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask again and again: other processes have no event for it."""
    async with asyncio.timeout(100):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


class RouterProcess:
    """`pdserve router` on a free port."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.port = 0

    @classmethod
    async def start(cls, *arguments: str, program: str | None = None) -> RouterProcess:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *(("-m", "pdserve") if program is None else ("-c", program)),
            "router",
            "--port",
            "0",
            *arguments,
            stderr=asyncio.subprocess.PIPE,
            preexec_fn=lambda: PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL),  # what a failed test leaves behind
        )
        return cls(process)

    async def listening(self) -> None:
        found = await self.said(rb"listening on http://[^:]+:(\d+)")
        self.port = int(found[1])

    async def said(self, pattern: bytes) -> re.Match[bytes]:
        """Read the log up to a line with this."""
        assert self.process.stderr is not None
        lines = []
        async with asyncio.timeout(60):
            while line := await self.process.stderr.readline():
                if found := re.search(pattern, line):
                    return found
                lines.append(line.decode())
        raise AssertionError(f"the router ended before it said {pattern!r}, but said: {''.join(lines)}")

    async def connect(self) -> Connection:
        return Connection(*await asyncio.open_connection("127.0.0.1", self.port))

    async def ask(self, path: str = CHAT, headers: Mapping[str, str] = {}) -> Response:
        """One request on a connection of its own: the kernel gives each of several processes some."""
        client = await self.connect()
        try:
            body = json.dumps(chat_body()).encode() if path == CHAT else b""
            await client.send(path, body, dict(headers), "POST" if path == CHAT else "GET")
            return await client.response()
        finally:
            client.leave()

    async def metric(self, name: str) -> float:
        return counted((await self.ask("/metrics")).body.decode(), f"pdserve_router_{name}")

    async def start_streaming(self) -> Connection:
        client = await self.connect()
        await client.send(CHAT, json.dumps(chat_body(stream=True)).encode())
        assert (await client.head()).status == 200
        assert await client.chunk() == EVENTS[0]
        return client

    async def refuses(self) -> None:
        """Until the listener is closed."""
        with pytest.raises(OSError):  # noqa: PT012
            while True:
                (await self.connect()).leave()
                await asyncio.sleep(0.01)

    @property
    def children(self) -> set[int]:
        """Process ids of its router processes."""
        pid = self.process.pid
        return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))

    async def replaced(self, before: set[int], count: int = 2) -> None:
        """Until all of its processes are others than before."""

        async def are_others() -> bool:
            there = self.children
            return len(there) == count and not there & before

        await until(are_others)

    async def ended(self) -> tuple[int, str]:
        _, said = await self.process.communicate()
        return self.process.returncode or 0, said.decode()


@asynccontextmanager
async def routing(file: Path, text: str) -> AsyncIterator[RouterProcess]:
    """A router with this configuration."""
    file.write_text(text)  # noqa: ASYNC240
    router = await RouterProcess.start("--config", str(file))
    try:
        await router.listening()
        yield router
    finally:
        if router.process.returncode is None:
            router.process.terminate()
            await router.ended()
