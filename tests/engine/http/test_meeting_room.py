"""The room of a direct hand-off, in a header."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from pdserve.engine.http.meeting_room import MeetingRoom, Room, enter_room, room_of_request


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    app.add_middleware(MeetingRoom)

    @app.get("/room")
    async def room() -> Room | None:
        return room_of_request()

    @app.get("/enter")
    async def enter() -> Room | None:
        enter_room(Room("h", None, 5))
        return room_of_request()

    return TestClient(app)


def test_a_request_is_of_the_room_of_its_own_header_only(client: TestClient) -> None:
    named = client.get("/room", headers={"x-pdserve-room": "::1 8998 4611686018427387903"})
    assert named.json() == ["::1", 8998, 2**62 - 1]
    assert client.get("/room").json() is None


def test_a_room_that_a_request_enters_is_its_own(client: TestClient) -> None:
    assert client.get("/enter").json() == ["h", None, 5]
    assert client.get("/room").json() is None


@pytest.mark.parametrize("value", ["", "10.0.0.5", "10.0.0.5 8998", "10.0.0.5 x 1", "a b c d", "10.0.0.5  1"])
def test_a_header_that_is_no_room_is_refused(client: TestClient, value: str) -> None:
    assert client.get("/room", headers={"x-pdserve-room": value}).status_code == 400
