"""Which streams are marked, and `POST /pd/continue`: an answer that another worker began.

`POST /pd/continue?endpoint=PATH` has as its body a line of JSON, `{"characters", "token_ids"}`, and then the
body that a client sent to PATH. It is served as PATH would serve it, but the tokens so far are computed as a
part of the prompt (`sglang/continuation.py`), and the events of the text so far are not sent again.

A server that stops breaks off what runs (`connection.py`): another worker takes over from the last mark.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import parse_qs

import msgspec

from pdserve.engine.contract.endpoints import CONTINUE, PROMPT_PATHS, check_endpoint
from pdserve.engine.http.connection import AsgiApp, Receive, Scope, Send, answer
from pdserve.engine.http.marked_stream import MARKS_HEADER, MarkedStream, SoFar
from pdserve.engine.http.request import current_request
from pdserve.errors import RequestError

MAX_BODY_BYTES = 64 * 1024 * 1024


class Continuing:
    """ASGI middleware, inside of `RequestTracking`; see the module's docstring."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record, so_far = current_request(), None
        if record is None or not (scope["path"] == CONTINUE or _asks_for_marks(scope)):
            await self._app(scope, receive, send)
            return
        if scope["path"] == CONTINUE:
            try:
                scope, receive, so_far = await _unwrap(scope, receive)
            except RequestError as error:
                await answer(send, error)
                return
        record.stream = MarkedStream(send, so_far)
        await self._app(scope, receive, record.stream.send)


def _asks_for_marks(scope: Scope) -> bool:
    return scope["path"] in PROMPT_PATHS and any(name == MARKS_HEADER for name, _ in scope["headers"])


async def _unwrap(scope: Scope, receive: Receive) -> tuple[Scope, Receive, SoFar]:
    """The request as the client sent it, and what it has of the answer. Raises RequestError."""
    endpoint = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("endpoint", [""])[0]
    check_endpoint(endpoint)
    line, _, body = (await whole_body(receive)).partition(b"\n")
    try:
        so_far = msgspec.json.decode(line, type=SoFar)
    except msgspec.MsgspecError as error:
        raise RequestError(400, f"The first line of the body: {error}") from None
    headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
    headers.append((b"content-length", b"%d" % len(body)))
    path = {"path": endpoint, "raw_path": endpoint.encode(), "query_string": b"", "headers": headers}
    return {**scope, **path}, replayed(body, receive), so_far


def replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body whole, and then what the server's gives."""
    rest = asyncio.Queue[MutableMapping[str, Any]](1)
    rest.put_nowait({"type": "http.request", "body": body, "more_body": False})

    async def replay() -> MutableMapping[str, Any]:
        return await receive() if rest.empty() else rest.get_nowait()

    return replay


async def whole_body(receive: Receive) -> bytes:
    """A request's body. Raises RequestError where it is too large, or its client left."""
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestError(400, "the caller left before its request was whole")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            raise RequestError(413, f"The body is larger than {MAX_BODY_BYTES} bytes.")
        more = message.get("more_body", False)
    return b"".join(parts)
