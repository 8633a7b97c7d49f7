"""The types of ASGI, and what its scope says of a client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]


def address_of(scope: Scope) -> str:
    """The client's IP address, or its proxy's; empty where the server does not know it."""
    client = scope.get("client")
    return str(client[0]) if client else ""
