"""A request and its answer over ASGI, for any ASGI server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from pdserve.router.server.client import Headers

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]


def address_of(scope: Scope) -> str:
    """The client's IP address, or its proxy's; empty where the server does not know it."""
    client = scope.get("client")
    return str(client[0]) if client else ""


class AsgiClient:
    """See `client.Client` for what has no comment here."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: Headers = scope["headers"]
        self.address = address_of(scope)
        task = asyncio.current_task()
        assert task is not None
        self.task: asyncio.Task[Any] = task
        self._receive = receive
        self._send = send
        self._head: Message | None = None
        self._watching: asyncio.Task[None] | None = None

    async def read(self) -> tuple[bytes, bool] | None:
        """The next piece of the request's body."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            return None
        return message.get("body", b""), message.get("more_body", False)

    def start(self, status: int, headers: Headers, length: int | None, *, closes: bool = False) -> None:
        """Begin the answer."""
        more = [(b"content-length", b"%d" % length)] if length is not None else []
        if closes:
            more.append((b"connection", b"close"))
        self._head = {"type": "http.response.start", "status": status, "headers": [*headers, *more]}

    async def write(self, body: bytes, more: bool) -> None:
        """Send a piece of the answer's body."""
        if self._head is not None:
            head, self._head = self._head, None
            await self._send(head)
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    takes_now = False

    def write_now(self, body: bytes) -> None:
        """ASGI has no such thing."""
        raise NotImplementedError

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Wait for the client's going beside the request."""
        self._watching = asyncio.get_running_loop().create_task(self._wait_gone(on_gone))

    def unwatch(self) -> None:
        """Wait no more."""
        if self._watching is not None:
            self._watching.cancel()

    async def _wait_gone(self, on_gone: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        on_gone()
