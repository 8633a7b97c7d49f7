"""What a router says of a request in headers: its salt, and its direct hand-off."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.engine.drain import Drain
from pdserve.engine.http.guard import Guard
from pdserve.engine.http.request_context import (
    Bootstrap,
    bootstrap_of_request,
    salt_of_request,
    set_bootstrap,
)
from tests.support.engine.manager import Client, scope_of

SALT, ROOM = b"x-pdserve-cache-salt", b"x-pdserve-room"
NONE = (None, None)


async def seen(*headers: tuple[bytes, bytes], kind: str = "http", enters: Bootstrap | None = None) -> Any:
    """(salt, room) within a request with these headers, or what the client is sent."""
    client, found = Client(), []

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        if enters is not None:
            set_bootstrap(enters)
        found.append((salt_of_request(), bootstrap_of_request()))

    guard = Guard(app, "", lambda: True, Drain(1.0, 0.0, set))
    await guard({**scope_of("/v1/x", *headers), "type": kind}, client.messages.get, client.send)
    assert (salt_of_request(), bootstrap_of_request()) == NONE, "it is the request's alone"
    return found[0] if found else client.sent[0]


@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_a_request_has_what_its_own_header_says_only(kind: str) -> None:
    said = ((SALT, b'"tenant/s\\u00e4lt"'), (ROOM, b"::1 8998 4611686018427387903"))
    assert await seen(*said, kind=kind) == ("tenant/sält", ("::1", 8998, 2**62 - 1))
    assert await seen(kind=kind) == NONE
    entered = Bootstrap("h", None, 5)
    assert await seen(kind=kind, enters=entered) == (None, entered)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        *((SALT, value) for value in (b"tenant/acme", b'""', b"null", b"[]", b'["a"]', b"{", b"1")),
        *((ROOM, value) for value in (b"", b"10.0.0.5", b"h 8998", b"h x 1", b"a b c d", b"h  1")),
    ],
)
async def test_a_header_that_cannot_be_read_is_refused(header: bytes, value: bytes) -> None:
    """Without a salt, pages of two tenants would have one name."""
    assert (await seen((header, value)))["status"] == 400
    assert (await seen((header, value), kind="websocket"))["type"] == "websocket.close"
