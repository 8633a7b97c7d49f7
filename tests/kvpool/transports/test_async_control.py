"""The control connection of an event loop against a scripted node."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdserve.errors import PoolUnavailable
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.frames import FrameBuffer, decode_request, encode_frame
from pdserve.kvpool.transports.async_control import AsyncControl
from pdserve.kvpool.transports.control import make_hello

WELCOME = m.Welcome(m.PROTOCOL_VERSION, "node", 1, "host", "shm", 30.0)


async def test_a_request_in_the_moment_between_the_sockets_end_and_its_notice_is_unavailable(
    tmp_path: Path,
) -> None:
    async def node(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameBuffer()
        while not (complete := list(frames.feed(await reader.read(4096)))):
            pass
        hello = decode_request(complete[0])
        assert isinstance(hello, m.Hello)
        writer.write(encode_frame(WELCOME))
        await reader.read()
        writer.close()

    path = str(tmp_path / "node.sock")
    async with await asyncio.start_unix_server(node, path):
        control = await AsyncControl.connect(f"unix:{path}", make_hello("test", "host", "auto"))
        control._writer.transport.abort()
        await asyncio.sleep(0)  # the transport is closed now, and the reading task not yet awake
        assert not control.broken
        with pytest.raises(PoolUnavailable):
            await control.call(lambda i: m.Ping(i))
