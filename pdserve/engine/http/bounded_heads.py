"""A worker's HTTP connections with bounds: uvicorn's, which would take endless headers, as slow as one likes,
and thousands of requests at once, from clients that have shown no token.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pdserve.security.connection_limits import ConnectionLimit

MAX_HEAD_BYTES: Final = 64 * 1024  # as the router has
MAX_HEADERS: Final = 256
MAX_PIPELINED: Final = 16
"""Requests that wait for the answer before theirs; each takes some kilobytes. Routers send none."""
HEAD_S: Final = 30.0
"""Time for a head from its first byte, and from a connection's start to its first head's end."""
_TOO_LONG: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)


class BoundedHeads(HttpToolsProtocol):
    """Answers a head that is too long with 431, and closes a connection whose head is too slow, or that sends
    too many requests at once. Beyond the bound of `connection_limit`, connections go that wait for no answer.
    """

    def __init__(
        self, *args: Any, connection_limit: ConnectionLimit[BoundedHeads] | None = None, **kwargs: Any
    ) -> None:
        """`connection_limit`: all connections of the server."""
        super().__init__(*args, **kwargs)
        self._connection_limit = ConnectionLimit(math.inf) if connection_limit is None else connection_limit
        self._head_bytes = 0  # received since the last head ended, or -1 while a body comes
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        super().connection_made(transport)
        self._limit_time()
        goes = self._connection_limit.came(self, self.client[0] if self.client else "", BoundedHeads._is_idle)
        if goes is not None:
            goes.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._unlimit_time()
        self._connection_limit.left(self)
        super().connection_lost(exc)

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if self.transport.is_closing():
            return
        if self._head_bytes >= 0:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers or ()) > MAX_HEADERS:
            self._refuse()

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._limit_time()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header line; those beyond the bound are not kept."""
        if len(self.headers) <= MAX_HEADERS:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete."""
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.close()
        if self.transport.is_closing():
            return  # with the rest of what was read at once
        self._head_bytes = -1
        self._unlimit_time()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is complete."""
        self._head_bytes = 0
        super().on_message_complete()

    def _refuse(self) -> None:
        self.headers = []
        if not self.transport.is_closing():
            self.transport.write(_TOO_LONG)
            self.transport.close()

    def _limit_time(self) -> None:
        self._unlimit_time()
        self._timer = self.loop.call_later(HEAD_S, self._too_slow)

    def _unlimit_time(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self.headers = []
        self.transport.close()
