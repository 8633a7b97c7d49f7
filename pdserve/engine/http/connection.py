"""One HTTP request as a middleware of ours sees it, between the server and SGLang's app.

It is the only reader of the server's `receive`. It passes the body on to SGLang and then waits for the
disconnect, so a client that leaves is noticed at once in every phase. A server reports a disconnect also when
the answer is complete (uvicorn does at once); then no client has left.

A request that this server's end aborted has no valid answer, whatever SGLang makes of it. If nothing was sent
yet, it is answered with a 503. Otherwise nothing more is sent, and the server closes the connection without
the end of the answer. So the router asks another worker, or lets another continue the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, NoReturn

import msgspec

from pdserve.errors import PdserveError, RequestError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_BODY_QUEUE_MESSAGES = 8  # the server's own flow control does the rest


class BrokenOff(PdserveError):
    """Nothing more of this answer is sent, so the app need not continue."""


def stopping() -> RequestError:
    """The answer to new and unanswered requests when the worker ends."""
    return RequestError(503, "this worker stops", type_="server_error", code="worker_stopping")


async def answer(
    send: Send,
    error: RequestError,
    headers: Sequence[tuple[bytes, bytes]] = (),
    body: bytes | None = None,
) -> None:
    """Answer a request with an error, whole. `body`: in another form than OpenAI's."""
    if body is None:
        body = msgspec.json.encode(error.body())
    own = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if error.status == 401:
        own.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": [*headers, *own]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def refuse(scope: Scope, receive: Receive, send: Send, error: RequestError) -> None:
    """Answer a request with an error. A WebSocket that is closed before it is accepted is answered 403."""
    if scope["type"] == "websocket":
        await receive()  # the handshake
        await send({"type": "websocket.close", "code": 1008, "reason": str(error)})
    else:
        await answer(send, error)


class Connection:
    """The server's side of one request, read ahead of the app that answers it."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        *,
        on_left: Callable[[], None],
        more_headers: Callable[[], list[tuple[bytes, bytes]]],
        on_complete: Callable[[], None],
        is_stopped: Callable[[], bool],
    ) -> None:
        self._receive = receive
        self._send = send
        self._on_left = on_left
        self._more_headers = more_headers
        self._on_complete = on_complete
        self._is_stopped = is_stopped
        self._is_begun = False
        self._start: MutableMapping[str, Any] | None = None
        self._messages: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue(_BODY_QUEUE_MESSAGES)
        self._ended: MutableMapping[str, Any] | None = None
        self._complete = False
        self.status: int | None = None
        """Of the answer."""

    async def read(self) -> None:
        """Until the server reports the end of the connection, or of the answer."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                if not self._complete:
                    self._on_left()
                await self._messages.put(message)
                return
            await self._messages.put(message)

    async def receive(self) -> MutableMapping[str, Any]:
        """For the app. After a disconnect every call reports it, as servers do."""
        if self._ended is None:
            message = await self._messages.get()
            if message["type"] != "http.disconnect":
                return message
            self._ended = message
        return self._ended

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """For the app. The head is held until the first piece of the body, when its headers are known.
        Raises BrokenOff where the end of this server has aborted the request.
        """
        if self._is_stopped():
            await self._break_off()
        if message["type"] == "http.response.start":
            self._start, self.status = message, message["status"]
            return
        if self._start is not None:
            start, self._start = self._start, None
            self._is_begun = True
            await self._send({**start, "headers": [*start.get("headers", ()), *self._more_headers()]})
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._complete = True
            self._on_complete()  # SGLang 0.5.23 returns from a stream 2 s after its end
        await self._send(message)

    async def _break_off(self) -> NoReturn:
        if not self._complete:
            self._complete = True
            self._on_complete()
            if not self._is_begun:
                self.status = stopping().status
                await answer(self._send, stopping())
        raise BrokenOff("this worker stops")
