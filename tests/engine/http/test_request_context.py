"""What a router says of a request in headers: its salt, and its direct hand-off."""

from __future__ import annotations

import pytest
from fastapi import FastAPI, WebSocket
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from pdserve.engine.drain import Drain
from pdserve.engine.http.guard import Guard
from pdserve.engine.http.request_context import (
    Bootstrap,
    bootstrap_of_request,
    salt_of_request,
    set_bootstrap,
)


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    app.add_middleware(Guard, token="", has_started=lambda: True, drain=Drain(1.0, 0.0, set))

    @app.get("/v1/salt")
    async def salt() -> str | None:
        return salt_of_request()

    @app.websocket("/v1/salt")
    async def said(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_json(salt_of_request())

    @app.get("/v1/room")
    async def room() -> Bootstrap | None:
        return bootstrap_of_request()

    @app.get("/v1/enter")
    async def enter() -> Bootstrap | None:
        set_bootstrap(Bootstrap("h", None, 5))
        return bootstrap_of_request()

    return TestClient(app)


def test_a_request_has_the_salt_of_its_own_header_only(client: TestClient) -> None:
    assert (
        client.get("/v1/salt", headers={"x-pdserve-cache-salt": '"tenant/s\\u00e4lt"'}).json()
        == "tenant/sält"
    )
    assert client.get("/v1/salt").json() is None


def test_a_websocket_has_its_salt_and_none_is_let_in_with_what_is_no_salt(client: TestClient) -> None:
    with client.websocket_connect("/v1/salt", headers={"x-pdserve-cache-salt": '"tenant/acme"'}) as socket:
        assert socket.receive_json() == "tenant/acme"
    with (
        pytest.raises(WebSocketDisconnect),
        client.websocket_connect("/v1/salt", headers={"x-pdserve-cache-salt": "tenant/acme"}),
    ):
        pass


@pytest.mark.parametrize("value", ["tenant/acme", '""', "null", "[]", '["a"]', "{", "1"])
def test_a_header_that_is_no_salt_is_refused(client: TestClient, value: str) -> None:
    """Without a salt, pages of two tenants would have one name."""
    assert client.get("/v1/salt", headers={"x-pdserve-cache-salt": value}).status_code == 400


def test_a_request_is_of_the_room_of_its_own_header_only(client: TestClient) -> None:
    named = client.get("/v1/room", headers={"x-pdserve-room": "::1 8998 4611686018427387903"})
    assert named.json() == ["::1", 8998, 2**62 - 1]
    assert client.get("/v1/room").json() is None


def test_a_room_that_a_request_enters_is_its_own(client: TestClient) -> None:
    assert client.get("/v1/enter").json() == ["h", None, 5]
    assert client.get("/v1/room").json() is None


@pytest.mark.parametrize("value", ["", "10.0.0.5", "10.0.0.5 8998", "10.0.0.5 x 1", "a b c d", "10.0.0.5  1"])
def test_a_header_that_is_no_room_is_refused(client: TestClient, value: str) -> None:
    assert client.get("/v1/room", headers={"x-pdserve-room": value}).status_code == 400
