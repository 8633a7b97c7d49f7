"""What a handler needs of a request and its client, and what a request needs of its connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from pdserve.router.server.flow import Flow

Headers = list[tuple[bytes, bytes]]


class Client(Protocol):
    """One request and its answer. Attributes are read only."""

    @property
    def method(self) -> str:
        """Of HTTP."""
        ...

    @property
    def path(self) -> str:
        """Without the query."""
        ...

    @property
    def headers(self) -> Headers:
        """Names in lower case."""
        ...

    @property
    def task(self) -> asyncio.Task[Any]:
        """The task that serves the request."""
        ...

    @property
    def address(self) -> str:
        """The client's IP address, or its proxy's; empty where the server does not know it."""
        ...

    async def read(self) -> tuple[bytes, bool] | None:
        """(the next piece of the request's body, whether more follows); None: the client has left."""
        ...

    def start(self, status: int, headers: Headers, length: int | None, *, closes: bool = False) -> None:
        """Begin the answer, whose body has `length` bytes, None: as many as will come. It goes out with the
        first of them. `closes`: the connection ends with the answer.
        """
        ...

    async def write(self, body: bytes, more: bool) -> None:
        """Send a piece of the answer's body; waits while the client is slow to read."""
        ...

    @property
    def takes_now(self) -> bool:
        """`write_now` can be used: the client is there and not slow to read."""
        ...

    def write_now(self, body: bytes) -> None:
        """Send a piece of the answer's body, not the last, without a task's help."""
        ...

    def watch(self, on_gone: Callable[[], None], on_asked: Callable[[], None] | None = None) -> None:
        """Until `unwatch`, call `on_gone` when the client goes away, now if it has. `on_asked` is called when
        an answer has begun and the client sends no more: what is sent then tells whether it still reads.
        """
        ...

    def unwatch(self) -> None:
        """The request is over."""
        ...


class Shared(Protocol):
    """What the connections of a server share."""

    @property
    def default_lines(self) -> bytes:
        """Whole header lines of every answer, like the date."""
        ...


class Wire(Protocol):
    """The connection that carries a request, as `RequestCycle` uses it."""

    loop: asyncio.AbstractEventLoop
    flow: Flow
    transport: asyncio.Transport
    tasks: set[asyncio.Task[Any]]
    """Of the whole server: a graceful stop waits for them."""
    client: tuple[str, int] | None
    """Address and port of the other end."""
    is_closing: bool
    """Nothing is sent any more."""

    @property
    def shared(self) -> Shared:
        """What all connections share."""
        ...

    @property
    def server(self) -> tuple[str, int] | None:
        """Address and port of this end."""
        ...

    @property
    def scheme(self) -> str:
        """`http`, or `https` where TLS is spoken."""
        ...

    def resume_reading(self) -> None:
        """Read on, if enough room is left: whether a client has left is seen only by reading."""
        ...

    def close_in_order(self) -> None:
        """Close after what was written was sent; the client may still send."""
        ...

    def on_response_complete(self) -> None:
        """The answer is sent: the next request's turn."""
        ...
