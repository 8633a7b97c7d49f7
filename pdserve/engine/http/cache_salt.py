"""The salt that a router sends in a header, for endpoints whose bodies take none in SGLang.

SGLang (0.5.23) begins the names of a prompt's pages with `cache_salt`, so requests with different salts never
share pages. `/v1/messages`, `/v1/embeddings` and others have no such member. The router sends
`x-pdserve-cache-salt: "tenant/NAME"` there, a JSON string. It replaces any salt of the body, on every route
that computes (`/pd/prefill`, `/pd/pull` and `/pd/continue` too).
"""

from __future__ import annotations

import json
from contextvars import ContextVar
from typing import Final

from pdserve.engine.http.connection import AsgiApp, Receive, Scope, Send, refuse
from pdserve.errors import RequestError

SALT_HEADER: Final = b"x-pdserve-cache-salt"
_salt: ContextVar[str | None] = ContextVar("pdserve_cache_salt", default=None)


def salt_of_request() -> str | None:
    """The salt that came with the HTTP request in whose context this code runs. None: its header has none."""
    return _salt.get()


class CacheSalt:
    """ASGI middleware; see the module's docstring."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or (given := _given(scope)) is None:
            await self._app(scope, receive, send)
            return
        try:
            salt = json.loads(given)
        except ValueError:
            salt = None
        if not isinstance(salt, str) or not salt:  # without it, pages of tenants would mix
            error = RequestError(400, f"{SALT_HEADER.decode()} is no JSON string")
            await refuse(scope, receive, send, error)
            return
        before = _salt.set(salt)
        try:
            await self._app(scope, receive, send)
        finally:
            _salt.reset(before)


def _given(scope: Scope) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == SALT_HEADER), None)
