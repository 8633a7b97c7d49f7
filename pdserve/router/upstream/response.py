"""One response of a worker while it arrives: its buffered body, its waiting reader, its end or error.

- The caller of the request owns the `Response` and must `release()` it on every path. After a complete
  response the connection is kept alive. Otherwise it is closed, which aborts the request in the worker.
- Back-pressure: beyond `HIGH_WATER_BYTES` of unread body, reading from the worker pauses.
- Every wait has a deadline (see `deadlines`). It counts only the time of waiting for the worker, not the time
  in which a slow client reads.
- Waking a task for each token of each stream costs more than passing the token on. So the relay of a stream
  may register a `Taker`: a callback that gets the bytes as soon as they are read from the connection.
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
"""Takes a piece of the body and returns True, or returns False to decline it. Must not raise."""


class UpstreamError(PdserveError):
    """A worker did not give a complete HTTP answer. `kind` is one word for metrics and log lines."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind


class Carrier(Protocol):
    """The methods of a connection that a response calls."""

    def pause_reading(self) -> None:
        """Stop reading bytes from the worker."""
        ...

    def resume_reading(self) -> None:
        """Read bytes from the worker again."""
        ...

    def end_response(self, whole: bool) -> None:
        """The response's owner has released it. `whole`: the response is complete and without error."""
        ...


class Response:
    """The response to one request. Chunks are buffered until they are read; back-pressure bounds them."""

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
        """Timeout of the current wait."""
        self.deadline_s = math.inf
        self.status = 0
        """0 until the head has arrived."""
        self.headers: list[tuple[bytes, bytes]] = []
        """Pairs of name and value; names are in lower case."""
        self.complete = False
        self.error: UpstreamError | None = None
        self.received_bytes = 0
        deadlines.add(self)

    # --- for the owner

    def news(self, timeout_s: float) -> asyncio.Future[None]:
        """A future that is done when more of the response has arrived, or its end. The deadline starts now.
        Raises UpstreamError where nothing more will come.
        """
        if self.error is not None:
            raise self.error
        loop = self._deadlines.loop
        self._waiter = waiter = loop.create_future()
        self._timeout_s = timeout_s
        self.deadline_s = loop.time() + timeout_s
        return waiter

    async def read_some(self, timeout_s: float) -> bytes:
        """Wait for bytes of the body. Returns all buffered bytes, or b"" at the end. Raises UpstreamError."""
        while not self._chunks:
            if self.complete and self.error is None:
                return b""
            await self.news(timeout_s)
        return self.take()

    async def give(self, taker: Taker, timeout_s: float) -> bytes:
        """Pass arriving bytes to `taker` until it declines, or until the body ends or fails.

        Returns the bytes that `taker` did not take, as `read_some` does. The deadline starts again with each
        piece that `taker` takes. The bytes that arrive with the end of the body are returned, not passed.
        """
        self._taker = taker
        try:
            return await self.read_some(timeout_s)
        finally:
            self._taker = None

    def take(self) -> bytes:
        """All buffered bytes of the body."""
        chunks = self._chunks
        data = chunks.popleft() if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._buffered_bytes = 0
        if self._paused:
            self._resume()
        return data

    async def read_all(self, timeout_s: float, limit_bytes: int) -> bytes:
        """The complete body. Raises UpstreamError if it breaks off or is longer than `limit_bytes`."""
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
        """The body has arrived completely and was read completely."""
        return self.complete and not self._chunks

    def release(self) -> None:
        """Keep the connection if the response is complete, else close it. Further calls have no effect."""
        self._deadlines.discard(self)
        if self._paused:
            self._resume()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.end_response(self.complete and self.error is None)
        self.error = None  # a reference cycle: its traceback refers to this response

    # --- for the deadline sweep

    def expire(self) -> None:
        """The deadline has passed."""
        self.fail(UpstreamError("timeout", "the worker did not answer in time"))

    # --- for the connection

    def fail(self, error: UpstreamError) -> None:
        """The response breaks off with `error`. Bytes that arrived before can still be read."""
        if self.error is None and not self.complete:
            self.error = error
        self.wake()

    def push(self, data: bytes) -> None:
        """Buffer a piece of the body. Pause reading from the worker if too much is unread."""
        self._chunks.append(data)
        self._buffered_bytes += len(data)
        if self._buffered_bytes > HIGH_WATER_BYTES and not self._paused and self._connection is not None:
            self._paused = True
            self._connection.pause_reading()

    def received(self) -> None:
        """The pieces of one read from the connection are all pushed: give them to the taker or the reader."""
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
        """Wake the task that waits for this response."""
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
