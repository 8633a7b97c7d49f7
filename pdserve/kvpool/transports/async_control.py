"""The control channel of asyncio programs: one socket, many requests in flight, replies matched by id.

Used by the asyncio client and by nodes among themselves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from pdserve.errors import PoolError, PoolRefused, PoolUnavailable
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.address import TcpAddress, parse_address
from pdserve.kvpool.protocol.cluster_messages import View
from pdserve.kvpool.protocol.frames import FrameBuffer, decode_reply, encode_frame
from pdserve.kvpool.transports.base import OnView
from pdserve.kvpool.transports.control import RESTARTING, hung_up

READ_BYTES = 256 * 1024
LAST_TURNS: Final = 4  # of the loop: to poll, read, take the reply, and go on


class LastWordsLost(PoolUnavailable):
    """The node hung up before it read all that we said. asyncio drops what it may have said last: that it is
    being upgraded, say. So it is worth asking once more.
    """


class AsyncControl:
    """An open, greeted control connection, with a namespace opened on it if one was named."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, label: str) -> None:
        self._reader = reader
        self._writer = writer
        self._label = label
        self._frames = FrameBuffer()
        self._waiting: dict[int, asyncio.Future[m.Reply]] = {}
        self._next_id = 0
        self._pump: asyncio.Task[None] | None = None
        self.namespace = 0
        self.welcome: m.Welcome
        self.broken: PoolError | None = None
        self.read_s = 0.0  # of time.monotonic(), when something was read last
        self.on_fault: Callable[[m.Fault], None] = lambda fault: None  # told what the node hung up with
        self.on_view: OnView | None = None  # told the views that the node pushes

    @classmethod
    async def connect(
        cls,
        address: str,
        hello: m.Hello,
        namespace: str | None = None,
        geometry: dict[str, str] | None = None,
    ) -> AsyncControl:
        """Raises PoolUnavailable, PoolRefused or FrameError. The caller bounds the time."""
        where = parse_address(address)
        try:
            if isinstance(where, TcpAddress):
                reader, writer = await asyncio.open_connection(where.host, where.port)
            else:
                reader, writer = await asyncio.open_unix_connection(where.path)
        except OSError as error:
            raise PoolUnavailable(f"pool node {address} cannot be reached: {error}") from error
        control = cls(reader, writer, address)
        try:
            await control._greet(hello)
            if namespace is not None:
                await control._open_namespace(namespace, geometry or {})
        except BaseException:
            control.close()
            raise
        return control

    async def call(self, make: Callable[[int], m.Request], timeout_s: float | None = None) -> m.Reply:
        """Send `make(id)`, return its reply. Raises PoolUnavailable, PoolRestarting; TimeoutError: it has not
        come, and is not among what the loop had no time to read. Without a time-out the caller bounds it.
        """
        if self.broken is not None:
            raise self._gone(self.broken) from self.broken
        self._next_id += 1
        request_id = self._next_id
        future: asyncio.Future[m.Reply] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        try:
            self._writer.write(encode_frame(make(request_id)))
            if timeout_s is not None:
                await asyncio.wait([future], timeout=timeout_s)
                for _ in range(LAST_TURNS):
                    if future.done():
                        break
                    await asyncio.sleep(0)
                else:
                    raise TimeoutError
            return await future
        finally:
            self._waiting.pop(request_id, None)
            future.cancel()

    def close(self) -> None:
        """Idempotent."""
        self._break(PoolUnavailable(f"the connection to pool node {self._label} was closed"))
        if self._pump is not None:
            self._pump.cancel()
        self._writer.close()

    async def _greet(self, hello: m.Hello) -> None:
        self._writer.write(encode_frame(hello))
        answer = await self._first_reply()
        if isinstance(answer, m.Fault) and answer.code in RESTARTING:
            raise hung_up(self._label, answer)
        if not isinstance(answer, m.Welcome):
            text = answer.message if isinstance(answer, m.Fault) else type(answer).__name__
            raise PoolRefused(f"pool node {self._label} refused the connection: {text}")
        self.welcome = answer
        self._pump = asyncio.create_task(self._read())

    async def _open_namespace(self, namespace: str, geometry: dict[str, str]) -> None:
        opened = await self.call(lambda i: m.OpenNamespace(i, namespace, geometry))
        if not isinstance(opened, m.Opened):
            text = opened.message if isinstance(opened, m.Fault) else type(opened).__name__
            raise PoolRefused(f"pool node {self._label}: {text}")
        self.namespace = opened.namespace

    async def _first_reply(self) -> m.Reply:
        while True:
            data = await self._receive()
            for body in self._frames.feed(data):
                return decode_reply(body)

    async def _receive(self) -> bytes:
        try:
            data = await self._reader.read(READ_BYTES)
        except OSError as error:
            raise LastWordsLost(f"pool node {self._label} went away: {error}") from error
        if not data:
            raise PoolUnavailable(f"pool node {self._label} closed the connection")
        return data

    async def _read(self) -> None:
        data = b""  # first, what came together with Welcome
        try:
            while True:
                for body in self._frames.feed(data):
                    self._take(decode_reply(body))
                data = await self._receive()
                self.read_s = time.monotonic()
        except PoolError as error:
            self._break(error)
            self._writer.close()

    def _take(self, reply: m.Reply) -> None:
        """Raises PoolUnavailable when it says that the node hangs up."""
        reply_id: int = getattr(reply, "id", 0)
        if reply_id == 0 and isinstance(reply, m.Fault):
            self.on_fault(reply)
            raise hung_up(self._label, reply)
        if reply_id == 0 and isinstance(reply, View):
            if self.on_view is not None:
                self.on_view(self.welcome, reply)
            return
        future = self._waiting.pop(reply_id, None)
        if future is not None and not future.done():
            future.set_result(reply)

    def _break(self, error: PoolError) -> None:
        self.broken = self.broken or error
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._gone(error))
        self._waiting.clear()

    def _gone(self, error: PoolError) -> PoolUnavailable:
        kind = type(error) if isinstance(error, PoolUnavailable) else PoolUnavailable
        return kind(str(error))
