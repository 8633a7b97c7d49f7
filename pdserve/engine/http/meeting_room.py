"""The room in which two workers meet for a direct hand-off, as the router names it in a header.

    x-pdserve-room: 127.0.0.1 8998 4062873260995395967      host and port of the prefill worker, number

SGLang has members of the body for this (`bootstrap_host` and others), but not on all endpoints. A client's
own never reach SGLang: a worker would connect to an address of the client's choice. With the header, all
requests to SGLang that the HTTP request makes are of that room.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final, NamedTuple

from pdserve.engine.http.connection import AsgiApp, Receive, Scope, Send, answer
from pdserve.errors import RequestError

ROOM_HEADER: Final = b"x-pdserve-room"


class Room(NamedTuple):
    """As SGLang's `bootstrap_host`, `bootstrap_port` and `bootstrap_room`."""

    host: str
    port: int | None
    number: int


_room: ContextVar[Room | None] = ContextVar("pdserve_room", default=None)


def room_of_request() -> Room | None:
    """The room of the HTTP request in whose context this code runs. None: nothing is handed over directly."""
    return _room.get()


def enter_room(room: Room) -> None:
    """The HTTP request in whose context this code runs is of this room from now on."""
    _room.set(room)


class MeetingRoom:
    """ASGI middleware; see the module's docstring."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = None
        if scope["type"] == "http":
            given = next((value for name, value in scope["headers"] if name == ROOM_HEADER), None)
        if given is None:
            await self._app(scope, receive, send)
            return
        try:
            host, port, number = given.decode("ascii").split(" ")
            room = Room(host, int(port), int(number))
        except ValueError:
            await answer(send, RequestError(400, f"{ROOM_HEADER.decode()} is not HOST PORT NUMBER"))
            return
        before = _room.set(room)
        try:
            await self._app(scope, receive, send)
        finally:
            _room.reset(before)
