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
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Final, NamedTuple

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
    """What the headers of one request say, for the code that runs within it (`with`)."""

    def __init__(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises RequestError for a header that cannot be read."""
        salt, room = headers.get(SALT_HEADER), headers.get(ROOM_HEADER)
        self._said = (
            None if salt is None else _parsed_salt(salt),
            None if room is None else _parsed_bootstrap(room),
        )

    def __enter__(self) -> None:
        salt, bootstrap = self._said
        self._before = _salt.set(salt), _bootstrap.set(bootstrap)

    def __exit__(self, *_: object) -> None:
        salt, bootstrap = self._before
        _salt.reset(salt)
        _bootstrap.reset(bootstrap)


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
