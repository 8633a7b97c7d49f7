"""The control connection of an event loop: a `ControlSession` over asyncio's streams, many requests at once.

session.py has the rules. Used by the asyncio client and by nodes among themselves.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from functools import partial
from typing import Final, assert_never

from pdserve.errors import PoolUnavailable
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.address import TcpAddress, parse_address
from pdserve.kvpool.protocol.frames import expected
from pdserve.kvpool.transports.dial import tls_error
from pdserve.kvpool.transports.session import (
    Answered,
    ControlSession,
    Ended,
    Event,
    Greeted,
    Proving,
    gone,
)

READ_BYTES: Final = 256 * 1024
LAST_TURNS: Final = 4  # turns of the event loop: to poll, read, take the reply, and continue


class LastWordsLost(PoolUnavailable):
    """The node closed the connection before it read all that we sent, so asyncio dropped its last message.

    That message may have said that the node is being upgraded, so one more try is useful.
    """


class AsyncControl:
    """An open control connection after its handshake, with a namespace opened on it if one was named."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        session: ControlSession,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._session = session
        self._waiting: dict[int, asyncio.Future[m.Reply]] = {}
        self._next_id = 0
        loop = asyncio.get_running_loop()
        self._greeted: asyncio.Future[None] = loop.create_future()
        self._pump = loop.create_task(self._read())
        self.namespace = 0
        self._geometry: dict[str, str] = {}
        self._numbers: dict[str, int] = {}  # of further namespaces of this geometry
        self.rights = 0  # rights of our token in the namespace: access.READ and so on
        self.read_s = 0.0  # time.monotonic() of the last read
        self.on_fault: Callable[[m.Fault], None] = lambda fault: None  # called with the node's last Fault

    @classmethod
    async def connect(
        cls,
        address: str,
        hello: m.Hello,
        namespace: str | None = None,
        geometry: dict[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> AsyncControl:
        """Connect and shake hands. `tls`: over TCP the node must show a certificate that this context accepts
        for the host in its address.

        Raises PoolUnavailable, PoolRestarting, PoolRefused or FrameError. The caller bounds the time.
        """
        session = ControlSession(address, hello)
        where = parse_address(address)
        try:
            if isinstance(where, TcpAddress):
                name = None if tls is None else where.host
                reader, writer = await asyncio.open_connection(
                    where.host, where.port, ssl=tls, server_hostname=name
                )
            else:
                reader, writer = await asyncio.open_unix_connection(where.path)
        except ssl.SSLError as error:
            raise tls_error(address, error) from error
        except OSError as error:
            raise PoolUnavailable(f"pool node {address} cannot be reached: {error}") from error
        control = cls(reader, writer, session)
        try:
            writer.write(session.greeting)
            await control._greeted
            if namespace is not None:
                await control._open_namespace(namespace, geometry or {})
        except BaseException:
            control.close()
            raise
        return control

    @property
    def welcome(self) -> m.Welcome:
        """The node's answer to our Hello."""
        return self._session.welcome

    @property
    def broken(self) -> bool:
        """The session has ended: every further use raises."""
        return self._session.ended is not None

    async def call(self, make: Callable[[int], m.Request], timeout_s: float | None = None) -> m.Reply:
        """Send `make(id)`, return its reply. Raises PoolUnavailable or PoolRestarting.

        Raises TimeoutError after `timeout_s`, when unread bytes have been read once more. None: no time-out.
        """
        self._next_id += 1
        request_id = self._next_id
        frame = self._session.send(make(request_id))
        future: asyncio.Future[m.Reply] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        try:
            # uvloop raises RuntimeError for a write to a transport that it has closed; `_read` learns of the
            # same end next, and answers `future` with its reason
            if not self._writer.is_closing():
                self._writer.write(frame)
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
        closed = PoolUnavailable(f"the connection to pool node {self._session.address} was closed")
        self._take(self._session.fail(closed))
        self._pump.cancel()

    async def _open_namespace(self, namespace: str, geometry: dict[str, str]) -> None:
        reply = await self.call(lambda i: m.OpenNamespace(i, namespace, geometry))
        opened = expected(reply, m.Opened, self._session.address)
        self.namespace, self.rights = opened.namespace, opened.rights
        self._geometry = geometry

    async def number_of(self, name: str, timeout_s: float) -> int:
        """The number of a further namespace of the same geometry; of the first one where `name` is empty.
        Raises as `call`, and RequestRefused: the node has none of this name for us.
        """
        if not name:
            return self.namespace
        if name not in self._numbers:
            made = partial(m.OpenNamespace, name=name, geometry=self._geometry)
            reply = expected(await self.call(made, timeout_s), m.Opened, self._session.address)
            self._numbers[name] = reply.namespace
        return self._numbers[name]

    def forgets(self, name: str) -> bool:
        """Open a further namespace anew at its next use; whether it was open."""
        return self._numbers.pop(name, None) is not None

    async def _read(self) -> None:
        while not self.broken:
            try:
                data = await self._reader.read(READ_BYTES)
            except ssl.SSLError as error:
                self._take(self._session.fail(tls_error(self._session.address, error)))
                return
            except OSError as error:
                text = f"pool node {self._session.address} went away: {error}"
                self._take(self._session.fail(LastWordsLost(text)))
                return
            self.read_s = time.monotonic()
            self._take(self._session.receive(data))

    def _take(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Answered(request_id, reply):
                    future = self._waiting.pop(request_id, None)  # None: its caller was cancelled
                    if future is not None and not future.done():
                        future.set_result(reply)
                case Proving(data):
                    self._writer.write(data)
                case Greeted():
                    if not self._greeted.done():
                        self._greeted.set_result(None)
                case Ended():
                    self._end(event)
                case _:
                    assert_never(event)

    def _end(self, ended: Ended) -> None:
        if ended.fault is not None:
            self.on_fault(ended.fault)
        if not self._greeted.done():
            self._greeted.set_exception(ended.error)
            self._greeted.exception()  # marks it as seen: a cancelled caller does not fetch it
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(gone(ended.error))
        self._waiting.clear()
        self._writer.close()
