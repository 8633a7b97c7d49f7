"""A node's own session with its own state: connection 0, which moves bytes by itself in the node's memory.

Pages that the node pulls from others take this way, so they are reserved, committed, bounded and accounted
for like pages of any client. Lives in the node's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdserve.errors import PoolUnavailable
from pdserve.kvpool.core.events import LOCAL, Connected, Event, Received
from pdserve.kvpool.protocol.messages import Abort, Release, Reply, Request


class LocalSession:
    """Requests of the node to itself. `feed` is the node's."""

    def __init__(self, feed: Callable[[Event], None]) -> None:
        self._feed = feed
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._next_id = 0
        self._closed = False
        feed(Connected(LOCAL, "shm", "this node", 0, peer=True))

    async def call(self, make: Callable[[int], Request]) -> Reply:
        """The reply to `make(id)`; a Fault is returned. Raises PoolUnavailable when the node stops. The
        caller bounds the time.
        """
        if self._closed:
            raise PoolUnavailable("the node stops")
        self._next_id += 1
        request_id = self._next_id
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        try:
            self._feed(Received(LOCAL, make(request_id)))
            return await future
        finally:
            self._waiting.pop(request_id, None)

    def post(self, message: Abort | Release) -> None:
        """A message without a reply."""
        if not self._closed:
            self._feed(Received(LOCAL, message))

    def answered(self, message: Reply) -> None:
        """The node's answer to one of ours."""
        future = self._waiting.get(getattr(message, "id", 0))
        if future is not None and not future.done():
            future.set_result(message)

    def close(self) -> None:
        """The node stops: tell all callers that wait."""
        self._closed = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(PoolUnavailable("the node stops"))
