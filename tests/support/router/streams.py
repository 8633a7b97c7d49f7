"""Streams as workers send them: with timings in the head, and with marks for a router that asks for them."""

from __future__ import annotations

import asyncio

from tests.support.router.mock_worker import (
    DONE,
    EVENTS,
    CloseConnection,
    Gate,
    Received,
    Script,
    Wire,
    event,
)

TIMING = "server-timing: queue;dur=1.0, pull;dur=0.001, compute;dur=3.0\r\n"


def telling(headers: str, computes_s: float = 0.0) -> Script:
    """A stream whose head says what workers say, and whose first token takes so long."""

    async def script(wire: Wire, request: Received) -> None:
        await wire.head(200, "text/event-stream", extra=headers)
        await asyncio.sleep(computes_s)
        for data in EVENTS:
            await wire.chunk(data)
        await wire.end()

    return script


def named(id_: str, content: str, finish: str | None = None) -> bytes:
    """One event of the worker that calls the stream `id_`."""
    return event(content, finish).replace(b'"id": "0123"', f'"id":"{id_}"'.encode())


def marked(*pieces: bytes, cut: bool = False, gate: Gate | None = None, extra: str = "") -> Script:
    """A marked stream. With a gate it is held after its pieces; `cut`: broken off instead of ended."""

    async def script(wire: Wire, request: Received) -> None:
        await wire.head(200, "text/event-stream", extra="x-pdserve-marks: 1\r\n" + extra)
        for piece in pieces:
            await wire.chunk(piece)
        if gate is not None:
            await gate.passed()
        if cut:
            raise CloseConnection
        await wire.end()

    return script


FIRST = (named("one", "Hé") + b": pd 2 0 7 8\n\n", named("one", "ll") + b": pd 4 2 9\n\n", named("one", "o"))
"""Three steps, the last not marked yet."""
SENT = named("one", "Hé") + named("one", "ll")
"""What a client has of FIRST."""
REST = (named("two", "o") + b": pd 5 3 10\n\n", named("two", "", "stop") + DONE)
WHOLE = named("one", "Hé") + named("one", "ll") + named("one", "o") + named("one", "", "stop") + DONE
