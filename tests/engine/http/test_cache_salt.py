"""The salt in a header, for endpoints whose bodies take none."""

from __future__ import annotations

import pytest
from fastapi import FastAPI, WebSocket
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from pdserve.engine.http.cache_salt import CacheSalt, salt_of_request


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    app.add_middleware(CacheSalt)

    @app.get("/salt")
    async def salt() -> str | None:
        return salt_of_request()

    @app.websocket("/salt")
    async def said(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_json(salt_of_request())

    return TestClient(app)


def test_a_request_has_the_salt_of_its_own_header_only(client: TestClient) -> None:
    assert (
        client.get("/salt", headers={"x-pdserve-cache-salt": '"tenant/s\\u00e4lt"'}).json() == "tenant/sält"
    )
    assert client.get("/salt").json() is None


def test_a_websocket_has_its_salt_and_none_is_let_in_with_what_is_no_salt(client: TestClient) -> None:
    with client.websocket_connect("/salt", headers={"x-pdserve-cache-salt": '"tenant/acme"'}) as socket:
        assert socket.receive_json() == "tenant/acme"
    with (
        pytest.raises(WebSocketDisconnect),
        client.websocket_connect("/salt", headers={"x-pdserve-cache-salt": "tenant/acme"}),
    ):
        pass


@pytest.mark.parametrize("value", ["tenant/acme", '""', "null", "[]", '["a"]', "{", "1"])
def test_a_header_that_is_no_salt_is_refused(client: TestClient, value: str) -> None:
    """Without a salt, pages of two tenants would have one name."""
    assert client.get("/salt", headers={"x-pdserve-cache-salt": value}).status_code == 400
