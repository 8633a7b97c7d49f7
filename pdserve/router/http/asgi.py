"""The ordinary routes: requests that an ASGI application answers, each in a task.

Source: https://asgi.readthedocs.io/en/latest/specs/www.html, version 2.3.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final
from urllib.parse import unquote

import httptools

from pdserve.router.http.client_request import Channel, ClientRequest, Headers

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger(__name__)

_VERSIONS: Final = {"version": "3.0", "spec_version": "2.3"}
_FAILED: Final = b"Internal Server Error"


def address_of(scope: Scope) -> str:
    """The client's IP address, or its proxy's; empty where the server does not know it."""
    client = scope.get("client")
    return str(client[0]) if client else ""


class Application:
    """Makes the requests that an ASGI application answers."""

    def __init__(self, application: Asgi) -> None:
        self._application = application

    def __call__(
        self, connection: Channel, method: bytes, target: bytes, path: str, headers: Headers
    ) -> ClientRequest:
        """As the constructor of ClientRequest."""
        return _OrdinaryRequest(self._application, connection, method, target, path, headers)


class _OrdinaryRequest(ClientRequest):
    __slots__ = ("_application", "_is_read", "_over", "_target", "_task")
    _task: asyncio.Task[None]

    def __init__(
        self,
        application: Asgi,
        connection: Channel,
        method: bytes,
        target: bytes,
        path: str,
        headers: Headers,
    ) -> None:
        super().__init__(connection, method, target, path, headers)
        self._application, self._target = application, target
        self._is_read = False
        self._over: asyncio.Event | None = None
        """The answer is complete, or the client has left. Made for an application that waits for it."""

    def begin(self) -> None:
        self._task = self.connection.loop.create_task(self._serve())
        self.connection.shared.running.add(self._task)

    def on_gone(self) -> None:
        if self._over is not None:
            self._over.set()

    async def _serve(self) -> None:
        """What the application raises ends here: it is logged, and the client told."""
        try:
            await self._application(self._scope(), self.receive_message, self.send_message)
        except Exception:  # boundary: whatever the application raises must not leave the client waiting
            logger.exception("the application failed at a request")
            if not self.has_head:
                self.start(500, b"content-type: text/plain\r\n", len(_FAILED), closes=True)
                await self.write(_FAILED, more=False)
        finally:
            self.connection.shared.running.discard(self._task)
            self.on_gone()
            if not (self.is_complete or self.is_gone):
                self.connection.transport.close()

    def _scope(self) -> Scope:
        connection = self.connection
        url = httptools.parse_url(self._target)  # it is one: the connection has looked
        path = url.path or b"/"
        method = self.method.decode("ascii")
        return {
            "type": "http",
            "asgi": _VERSIONS,
            "http_version": self.version,
            "method": "GET" if method == "HEAD" else method,  # `send` leaves the body out
            "scheme": connection.scheme,
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": url.query or b"",
            "root_path": "",
            "headers": self.headers,
            "client": connection.client,
            "server": connection.server,
            "state": {},
        }

    async def receive_message(self) -> Message:
        """ASGI's `receive`: the next piece of the body; after the last one, the end is waited for."""
        if not (self.is_complete or self._is_read):
            piece = await self.read()
            if piece is not None:
                body, more = piece
                self._is_read = not more
                if not more:
                    self.connection.read_on()
                return {"type": "http.request", "body": body, "more_body": more}
        elif not (self.is_complete or self.is_gone):
            if self._over is None:
                self._over = asyncio.Event()
            await self._over.wait()
        return {"type": "http.disconnect"}

    async def send_message(self, message: Message) -> None:
        """ASGI's `send`: a part of the answer. Raises ValueError for a header that would be more than one."""
        if message["type"] == "http.response.start":
            length, closes, lines = None, False, b""
            for name, value in message.get("headers", ()):
                if name == b"content-length":
                    length = int(value)
                elif name == b"connection":
                    closes = closes or value.lower() == b"close"
                elif b"\n" in name or b"\n" in value or b"\r" in name or b"\r" in value:
                    raise ValueError("an answer's header holds the end of a line")
                else:
                    lines += b"%b: %b\r\n" % (name, value)
            self.start(message["status"], lines, length, closes=closes)
            return
        more: bool = message.get("more_body", False)
        await self.write(message.get("body", b""), more=more)
        if not more:
            self.on_gone()
