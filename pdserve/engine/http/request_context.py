"""What a router says of a request in headers, for endpoints whose bodies have no member for it in SGLang.

    x-pdserve-cache-salt: "tenant/NAME"                       a JSON string
    x-pdserve-room: 127.0.0.1 8998 4062873260995395967        of a direct hand-off: host and port of the
                                                              prefill worker's bootstrap server, room

SGLang (0.5.23) begins the names of a prompt's pages with `cache_salt`, so requests with different salts never
share pages. `/v1/messages`, `/v1/embeddings` and others have no such member. The header's salt replaces any
of the body, on every route that computes (`/pd/prefill`, `/pd/pull` and `/pd/continue` too).

A client's own `bootstrap_*` members never reach SGLang: a worker would connect to an address of the client's
choice. With the header, all requests to SGLang that the HTTP request makes are of that room.
"""

from __future__ import annotations

import json
from contextvars import ContextVar
from typing import Final, NamedTuple

from pdserve.engine.http.connection import AsgiApp, Receive, Scope, Send, refuse
from pdserve.errors import RequestError

SALT_HEADER: Final = b"x-pdserve-cache-salt"
ROOM_HEADER: Final = b"x-pdserve-room"


class Bootstrap(NamedTuple):
    """As SGLang's `bootstrap_host`, `bootstrap_port` and `bootstrap_room`."""

    host: str
    port: int | None
    room: int


_salt: ContextVar[str | None] = ContextVar("pdserve_cache_salt", default=None)
_bootstrap: ContextVar[Bootstrap | None] = ContextVar("pdserve_bootstrap", default=None)


def salt_of_request() -> str | None:
    """The salt that came with the HTTP request in whose context this code runs. None: its header has none."""
    return _salt.get()


def bootstrap_of_request() -> Bootstrap | None:
    """The direct hand-off of the HTTP request in whose context this code runs. None: there is none."""
    return _bootstrap.get()


def set_bootstrap(bootstrap: Bootstrap) -> None:
    """The HTTP request in whose context this code runs has this hand-off from now on."""
    _bootstrap.set(bootstrap)


class RequestContext:
    """ASGI middleware; see the module's docstring."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        salt = bootstrap = None
        try:
            for name, value in scope["headers"]:
                if name == SALT_HEADER:
                    salt = _parsed_salt(value)
                elif name == ROOM_HEADER:
                    bootstrap = _parsed_bootstrap(value)
        except RequestError as error:
            await refuse(scope, receive, send, error)
            return
        salt_before, bootstrap_before = _salt.set(salt), _bootstrap.set(bootstrap)
        try:
            await self._app(scope, receive, send)
        finally:
            _salt.reset(salt_before)
            _bootstrap.reset(bootstrap_before)


def _parsed_salt(value: bytes) -> str:
    """Raises RequestError: without its salt, pages of tenants would mix."""
    try:
        salt = json.loads(value)
    except ValueError:
        salt = None
    if not isinstance(salt, str) or not salt:
        raise RequestError(400, f"{SALT_HEADER.decode()} is no JSON string")
    return salt


def _parsed_bootstrap(value: bytes) -> Bootstrap:
    """Raises RequestError."""
    try:
        host, port, room = value.decode("ascii").split(" ")
        return Bootstrap(host, int(port), int(room))
    except ValueError:
        raise RequestError(400, f"{ROOM_HEADER.decode()} is not HOST PORT NUMBER") from None
