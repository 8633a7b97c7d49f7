"""The asyncio pool client of a worker's HTTP process: questions only (exists, wait, status), no page bytes.

One connection per node, shared by all tasks, replies matched by id. A node that is away is not asked again
before `retry_after_s`; its keys count as absent. Every call ends by its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from pdserve.errors import FrameError, PoolError, PoolRefused, PoolRestarting, PoolTimeout, PoolUnavailable
from pdserve.kvpool import messages as m
from pdserve.kvpool.client_config import PoolClientConfig
from pdserve.kvpool.ring import Ring
from pdserve.kvpool.transports.control import TcpAddress, hung_up, make_hello, parse_address

logger = logging.getLogger(__name__)
MakeQuestion: TypeAlias = Callable[[int, int, list[bytes]], m.Exists | m.Wait]  # id, namespace, keys
READ_BYTES = 256 * 1024
WAITERS_RETRY_S = 0.05


class AsyncControl:
    """An open, greeted control connection, with a namespace opened on it if one was named."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, label: str) -> None:
        self._reader = reader
        self._writer = writer
        self._label = label
        self._frames = m.FrameBuffer()
        self._waiting: dict[int, asyncio.Future[m.Reply]] = {}
        self._next_id = 0
        self._pump: asyncio.Task[None] | None = None
        self.namespace = 0
        self.welcome: m.Welcome
        self.broken: PoolError | None = None
        self.on_fault: Callable[[m.Fault], None] = lambda fault: None  # told what the node hung up with

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

    async def call(self, make: Callable[[int], m.Request]) -> m.Reply:
        """Send `make(id)`, return its reply. Raises PoolUnavailable. The caller bounds the time."""
        if self.broken is not None:
            raise PoolUnavailable(str(self.broken)) from self.broken
        self._next_id += 1
        request_id = self._next_id
        future: asyncio.Future[m.Reply] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        try:
            self._writer.write(m.encode_frame(make(request_id)))
            return await future
        finally:
            self._waiting.pop(request_id, None)

    def close(self) -> None:
        """Idempotent."""
        self._break(PoolUnavailable(f"the connection to pool node {self._label} was closed"))
        if self._pump is not None:
            self._pump.cancel()
        self._writer.close()

    async def _greet(self, hello: m.Hello) -> None:
        self._writer.write(m.encode_frame(hello))
        answer = await self._first_reply()
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
                return m.decode_reply(body)

    async def _receive(self) -> bytes:
        try:
            data = await self._reader.read(READ_BYTES)
        except OSError as error:
            raise PoolUnavailable(f"pool node {self._label} went away: {error}") from error
        if not data:
            raise PoolUnavailable(f"pool node {self._label} closed the connection")
        return data

    async def _read(self) -> None:
        try:
            while True:
                for body in self._frames.feed(await self._receive()):
                    reply = m.decode_reply(body)
                    if isinstance(reply, m.Fault) and reply.id == 0:
                        self.on_fault(reply)
                        raise hung_up(self._label, reply)
                    future = self._waiting.pop(getattr(reply, "id", 0), None)
                    if future is not None and not future.done():
                        future.set_result(reply)
        except PoolError as error:
            self._break(error)
            self._writer.close()

    def _break(self, error: PoolError) -> None:
        self.broken = self.broken or error
        kind = PoolRestarting if isinstance(error, PoolRestarting) else PoolUnavailable
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(kind(str(error)))
        self._waiting.clear()


class AsyncPoolClient:
    """One namespace of the pool over all its nodes; lives in one event loop."""

    def __init__(self, config: PoolClientConfig, namespace: str, geometry: dict[str, str]) -> None:
        self.config = config
        self.namespace = namespace
        self._geometry = geometry
        self._addresses = {ref.node: ref.address for ref in config.nodes}
        self._ring = Ring([m.NodeAddress(ref.node, ref.address, ref.weight) for ref in config.nodes])
        self._open: dict[str, AsyncControl] = {}
        self._connecting: dict[str, asyncio.Lock] = {node: asyncio.Lock() for node in self._addresses}
        self._retry_at_s: dict[str, float] = {}

    async def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are committed; False where the owner is away."""
        return await self._ask(keys, self.config.exists_timeout_s, m.Exists)

    async def wait(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        """Block until all keys are committed, at most `timeout_s`; which are. Ends early for nodes that are
        away.
        """

        deadline = time.monotonic() + timeout_s

        def make(request_id: int, namespace: int, part: list[bytes]) -> m.Wait:
            return m.Wait(request_id, namespace, part, max(0.0, deadline - time.monotonic()))

        # the node answers at the deadline; the answer gets a moment more to travel
        return await self._ask(keys, timeout_s + self.config.exists_timeout_s, make)

    async def check(self) -> dict[str, PoolError | None]:
        """Connect to every node; per node, None or what went wrong."""
        outcome: dict[str, PoolError | None] = {}
        for node in self._addresses:
            try:
                await self._control(node)
                outcome[node] = None
            except PoolError as error:
                outcome[node] = error
        return outcome

    async def status(self) -> dict[str, m.StatusReport]:
        """Status of every reachable node."""
        result: dict[str, m.StatusReport] = {}
        for node in self._addresses:
            with contextlib.suppress(PoolError):
                reply = await self._call(node, m.Status, self.config.exists_timeout_s)
                if isinstance(reply, m.StatusReport):
                    result[node] = reply
        return result

    def close(self) -> None:
        """Close all connections; idempotent."""
        for control in self._open.values():
            control.close()
        self._open.clear()

    async def _ask(
        self,
        keys: Sequence[bytes],
        timeout_s: float,
        make: MakeQuestion,
    ) -> list[bool]:
        result = [False] * len(keys)

        async def part(node: str, places: list[int]) -> None:
            try:
                mask = await self._present(node, [keys[i] for i in places], timeout_s, make)
            except PoolError as error:
                logger.debug("pool node %s: %s", node, error)
                return
            for place, byte in zip(places, mask, strict=True):
                result[place] = byte == 1

        jobs = [
            part(node, places[start : start + m.MAX_KEYS])
            for node, places in (self._ring.split(keys).items() if self._addresses else ())
            for start in range(0, len(places), m.MAX_KEYS)
        ]
        await asyncio.gather(*jobs)
        return result

    async def _present(
        self,
        node: str,
        keys: list[bytes],
        timeout_s: float,
        make: MakeQuestion,
    ) -> bytes:
        """The node's mask of the keys. Raises PoolError."""
        deadline = time.monotonic() + timeout_s
        while True:
            control = await self._control(node)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise PoolTimeout(f"pool node {node}: connecting took all the time")
            request = partial(_with_id, make, control.namespace, keys)
            reply = await self._bounded(node, control, request, left_s)
            if isinstance(reply, m.Present) and len(reply.mask) == len(keys):
                return reply.mask
            if isinstance(reply, m.Fault) and reply.code == "too_many_waiters":
                # others wait on this connection, some perhaps for nobody any more: their place comes free
                if time.monotonic() + WAITERS_RETRY_S >= deadline:
                    raise PoolTimeout(f"pool node {node}: {reply.message}")
                await asyncio.sleep(WAITERS_RETRY_S)
                continue
            # a namespace that was dropped, say: the next connection opens it again
            self._drop(node, control)
            text = reply.message if isinstance(reply, m.Fault) else f"unexpected {type(reply).__name__}"
            logger.warning("pool node %s: %s", node, text)
            raise PoolRefused(f"pool node {node}: {text}")

    async def _call(self, node: str, make: Callable[[int], m.Request], timeout_s: float) -> m.Reply:
        return await self._bounded(node, await self._control(node), make, timeout_s)

    async def _bounded(
        self, node: str, control: AsyncControl, make: Callable[[int], m.Request], timeout_s: float
    ) -> m.Reply:
        try:
            return await asyncio.wait_for(control.call(make), timeout_s)
        except TimeoutError:
            # A node that does not answer is treated as gone: the next call reconnects or skips it.
            self._drop(node, control)
            raise PoolTimeout(f"pool node {node} did not answer in {timeout_s} s") from None
        except PoolUnavailable:
            self._drop(node, control)
            raise

    async def _control(self, node: str) -> AsyncControl:
        control = self._open.get(node)
        if control is not None and control.broken is None:
            return control
        async with self._connecting[node]:
            control = self._open.get(node)
            if control is not None and control.broken is None:
                return control
            if time.monotonic() < self._retry_at_s.get(node, 0.0):
                raise PoolUnavailable(f"pool node {node} is down")
            hello = make_hello("worker", "", "none", self.config.token)
            connecting = AsyncControl.connect(self._addresses[node], hello, self.namespace, self._geometry)
            try:
                control = await asyncio.wait_for(connecting, self.config.connect_timeout_s)
            except (TimeoutError, PoolError, FrameError) as error:
                self._retry_at_s[node] = time.monotonic() + self.config.retry_after_s
                if isinstance(error, TimeoutError):
                    raise PoolTimeout(f"pool node {node} does not answer") from None
                raise
            self._open[node] = control
            return control

    def _drop(self, node: str, control: AsyncControl) -> None:
        control.close()
        if self._open.get(node) is control:
            del self._open[node]
        self._retry_at_s[node] = time.monotonic() + self.config.retry_after_s


def _with_id(make: MakeQuestion, namespace: int, keys: list[bytes], request_id: int) -> m.Exists | m.Wait:
    return make(request_id, namespace, keys)
