"""One response of a worker as it comes in: what is there, what is awaited, how it ended.

- Whoever asked owns the `Response` and must `release()` it on every path. Released whole and clean, the
  connection is kept alive; otherwise it is cut at once, and that is what aborts the request in the worker.
- Back-pressure: beyond `HIGH_WATER_BYTES` unread, reading from the worker pauses until they were read.
- Every wait has a deadline (see `deadlines`), counted only while somebody waits for the worker, not while the
  client is slow to read.
- Waking a task for each token of each stream costs more than passing the token on. So who relays a stream may
  leave a `Taker` here, which gets what comes as soon as it was read from the connection.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias

from pdserve.errors import PdserveError
from pdserve.router.deadlines import Deadlines

HIGH_WATER_BYTES = 256 * 1024

ErrorKind = Literal["connect", "timeout", "closed", "protocol", "busy", "cut", "down"]

Taker: TypeAlias = Callable[[bytes], bool]
"""Takes a piece of the body at once, or says that it cannot now. Must not raise."""


class UpstreamError(PdserveError):
    """A worker did not answer as HTTP wants it to. `kind` is one word for metrics and log lines."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind


class Carrier(Protocol):
    """What a response asks of the connection that carries it."""

    def pause_reading(self) -> None:
        """Take no more bytes from the worker."""
        ...

    def resume_reading(self) -> None:
        """Take bytes from the worker again."""
        ...

    def end_response(self, whole: bool) -> None:
        """The response's owner is done with it; `whole`: the response came to its end."""
        ...


class Response:
    """The response to one request. Chunks are kept until read, bounded by back-pressure."""

    __slots__ = (
        "_buffered_bytes",
        "_chunks",
        "_connection",
        "_deadlines",
        "_paused",
        "_taker",
        "_timeout_s",
        "_waiter",
        "complete",
        "deadline_s",
        "error",
        "headers",
        "received_bytes",
        "status",
    )

    def __init__(self, connection: Carrier, deadlines: Deadlines) -> None:
        self._connection: Carrier | None = connection
        self._deadlines = deadlines
        self._chunks: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._taker: Taker | None = None
        self._timeout_s = math.inf
        """Of the wait that runs."""
        self.deadline_s = math.inf
        self.status = 0
        """0 until the head has come."""
        self.headers: list[tuple[bytes, bytes]] = []
        """Names in lower case."""
        self.complete = False
        self.error: UpstreamError | None = None
        self.received_bytes = 0
        deadlines.add(self)

    # --- for the owner

    async def head(self, timeout_s: float) -> int:
        """The response's status, once its head is there. Raises UpstreamError."""
        while not self.status:
            if self.error is not None:
                raise self.error
            await self._news(timeout_s)
        return self.status

    async def read_some(self, timeout_s: float) -> bytes:
        """The next bytes of the body, everything that is there; b"" at its end. Raises UpstreamError when
        it breaks.
        """
        while not self._chunks:
            if self.error is not None:
                raise self.error
            if self.complete:
                return b""
            await self._news(timeout_s)
        return self.take()

    async def give(self, taker: Taker, timeout_s: float) -> bytes:
        """As `read_some`, but what comes meanwhile goes to `taker`, and each time the wait begins anew; until
        it declines, or the body ends or breaks. What comes together with the end is not given to it.
        """
        self._taker = taker
        try:
            return await self.read_some(timeout_s)
        finally:
            self._taker = None

    def take(self) -> bytes:
        """What has come of the body and was not read."""
        chunks = self._chunks
        data = chunks.popleft() if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._buffered_bytes = 0
        if self._paused:
            self._resume()
        return data

    async def read_all(self, timeout_s: float, limit_bytes: int) -> bytes:
        """The whole body. Raises UpstreamError when it breaks or is longer than `limit_bytes`."""
        data = await self.read_some(timeout_s)
        if self.at_end:
            return data
        parts, size = [data], len(data)
        while data := await self.read_some(timeout_s):
            parts.append(data)
            size += len(data)
            if size > limit_bytes:
                raise UpstreamError("protocol", f"answer is longer than {limit_bytes} bytes")
        return b"".join(parts)

    @property
    def at_end(self) -> bool:
        """The whole body has come and been read."""
        return self.complete and not self._chunks

    def release(self) -> None:
        """The owner is done: keep the connection if the response came whole, else cut it. May be called
        again.
        """
        self._deadlines.discard(self)
        if self._paused:
            self._resume()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.end_response(self.complete and self.error is None)
        self.error = None  # it holds what it was raised through, which holds this

    # --- for the deadline sweep

    def expire(self) -> None:
        """Nothing came in time."""
        self.fail(UpstreamError("timeout", "the worker did not answer in time"))

    # --- for the connection

    def fail(self, error: UpstreamError) -> None:
        """The response breaks off here; bytes that came before can still be read."""
        if self.error is None and not self.complete:
            self.error = error
        self.wake()

    def push(self, data: bytes) -> None:
        """A piece of the body."""
        self._chunks.append(data)
        self._buffered_bytes += len(data)
        if self._buffered_bytes > HIGH_WATER_BYTES and not self._paused and self._connection is not None:
            self._paused = True
            self._connection.pause_reading()

    def received(self) -> None:
        """All that was read from the connection at once has been pushed."""
        if self._waiter is None or not self._chunks:
            return
        if self._taker is not None:
            data = self.take()
            if self._taker(data):
                self.deadline_s = self._deadlines.loop.time() + self._timeout_s
                return
            self.push(data)
        self.wake()

    def wake(self) -> None:
        """There is something new for the owner."""
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            self.deadline_s = math.inf
            if not waiter.done():  # cancelled: the owner is about to release
                waiter.set_result(None)

    def _resume(self) -> None:
        self._paused = False
        if self._connection is not None:
            self._connection.resume_reading()

    def _news(self, timeout_s: float) -> asyncio.Future[None]:
        """Is done when there is something new; the deadline runs until then."""
        loop = self._deadlines.loop
        self._waiter = waiter = loop.create_future()
        self._timeout_s = timeout_s
        self.deadline_s = loop.time() + timeout_s
        return waiter
