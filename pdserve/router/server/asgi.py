"""An ASGI application behind the server's own connections.

The types of ASGI, and what its scope says of a client.

An ASGI application behind the server's own connections: it gets each request and gives the answer.

Source: https://asgi.readthedocs.io/en/latest/specs/www.html, version 2.3.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final
from urllib.parse import unquote

import httptools

from pdserve.router.server.request_cycle import RequestCycle

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]


def address_of(scope: Scope) -> str:
    """The client's IP address, or its proxy's; empty where the server does not know it."""
    client = scope.get("client")
    return str(client[0]) if client else ""


logger = logging.getLogger(__name__)

_VERSIONS: Final = {"version": "3.0", "spec_version": "2.3"}
_FAILED: Final = b"Internal Server Error"


class Application:
    """Answers requests by an ASGI application."""

    def __init__(self, application: Asgi) -> None:
        self._application = application

    async def serve(self, client: RequestCycle) -> None:
        """Answer one request. What the application raises ends here: it is logged, and the client told."""
        asked = _Asked(client)
        try:
            await self._application(_scope_of(client), asked.receive, asked.send)
        except Exception:  # boundary: whatever the application raises must not leave the client waiting
            logger.exception("the application failed at a request")
            if not client.response_started:
                client.start(500, [(b"content-type", b"text/plain")], len(_FAILED), closes=True)
                await client.write(_FAILED, more=False)
        finally:
            asked.end()


def _scope_of(client: RequestCycle) -> Scope:
    wire, url = client.wire, httptools.parse_url(client.target)  # it is one: the connection has looked
    path = url.path or b"/"
    return {
        "type": "http",
        "asgi": _VERSIONS,
        "http_version": client.version,
        "method": "GET" if client.method == "HEAD" else client.method,  # `send` leaves the body out
        "scheme": wire.scheme,
        "path": unquote(path.decode("ascii")),
        "raw_path": path,
        "query_string": url.query or b"",
        "root_path": "",
        "headers": client.headers,
        "client": wire.client,
        "server": wire.server,
        "state": {},
    }


class _Asked:
    """One request and its answer, as the application has them."""

    def __init__(self, client: RequestCycle) -> None:
        self._client = client
        self._is_read = False
        self._over: asyncio.Event | None = None
        """The answer is complete, or the client has left. Made for an application that waits for it."""

    async def receive(self) -> Message:
        """The next piece of the body; after the last one, wait for the end."""
        client = self._client
        if not (client.response_complete or self._is_read):
            piece = await client.read()
            if piece is not None:
                body, more = piece
                self._is_read = not more
                return {"type": "http.request", "body": body, "more_body": more}
        elif not client.response_complete:
            if self._over is None:
                self._over = asyncio.Event()
                client.watch(self._over.set)
            await self._over.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """A part of the answer."""
        client = self._client
        if message["type"] == "http.response.start":
            self._start(message["status"], list(message.get("headers", ())))
            return
        more: bool = message.get("more_body", False)
        body: bytes = message.get("body", b"")
        await client.write(b"" if client.method == "HEAD" else body, more)
        if not more:
            self.end()

    def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        length, closes, others = None, False, []
        for name, value in headers:
            if name == b"content-length":
                length = int(value)
            elif name == b"connection":
                closes = closes or value.lower() == b"close"
            else:
                others.append((name, value))
        self._client.start(status, others, length, closes=closes)

    def end(self) -> None:
        """The answer is complete, or there is none."""
        if self._over is not None:
            self._over.set()
            self._client.unwatch()
            self._over = None
