"""Relaying a decode worker's answer to the client, its bytes untouched.

A stream (server-sent events) is passed on as it comes, but only up to the end of the last whole event:
should the worker break off inside one, the client gets the error event at a place where it can be read. An
answer that is not a stream is passed on when it is whole, so that half an answer is never sent as one.
Nothing is sent before the first byte of the body is there; until then the request can still go to another
worker. Once a stream has begun, its pieces go from one connection to the other without waking the call's
task, which only sees to a slow client and to the end.
"""

from __future__ import annotations

import asyncio

from pdserve.router.dispatch.resume import Trail
from pdserve.router.request import timing
from pdserve.router.request.call import Call
from pdserve.router.upstream.response import Response

MAX_ANSWER_BYTES = 256 * 1024 * 1024
_OWN_HEADERS = frozenset(
    (
        b"connection",
        b"content-length",
        b"date",
        b"keep-alive",
        b"server",
        b"server-timing",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-pdserve-marks",
        b"x-request-id",
    )
)
"""Headers that belong to one connection or that the router sets itself."""


def is_event_stream(exchange: Response) -> bool:
    """Whether the answer is a stream of server-sent events."""
    for name, value in exchange.headers:
        if name == b"content-type":
            return value.startswith(b"text/event-stream")
    return False


def passed_headers(exchange: Response) -> list[tuple[bytes, bytes]]:
    """The worker's headers that go to the client."""
    return [pair for pair in exchange.headers if pair[0] not in _OWN_HEADERS]


async def relay_whole(call: Call, exchange: Response, first_byte_s: float, between_s: float) -> None:
    """Pass on an answer that is not a stream, once it is there. Raises UpstreamError with nothing sent."""
    if exchange.complete:
        body = exchange.take()
    else:
        body = await exchange.read_some(first_byte_s)
        if not exchange.at_end:
            body += await exchange.read_all(between_s, MAX_ANSWER_BYTES)
    call.start(exchange.status, passed_headers(exchange), len(body))
    await call.write(body, more=False)


async def relay_events(call: Call, exchange: Response, trail: Trail, data: bytes, between_s: float) -> None:
    """Pass on a stream, of which `data` has been read. Raises UpstreamError when the worker breaks off;
    `call.is_started` says if anything was sent.
    """
    held = b""

    def pass_on(data: bytes) -> bool:
        nonlocal held
        if not call.client.takes_now:
            return False
        ready, held = trail.take(held + data, at_end=False)
        if ready:
            call.write_now(ready)
        return True

    while True:
        at_end = exchange.at_end
        ready, held = trail.take(held + data, at_end)
        if ready or at_end:
            if not call.is_started:
                headers = passed_headers(exchange)
                now_s = asyncio.get_running_loop().time()
                timing.finish(
                    call.parts_s, call.asked_s, timing.pull_s(exchange.headers), call.started_s, now_s
                )
                headers.append((timing.TIMING_HEADER, timing.timing(call.parts_s)))
                call.start(exchange.status, headers, None)
                call.phase = "stream"
            await call.write(ready, more=not at_end)
            if at_end:
                return
        if call.is_started:
            data = await exchange.give(pass_on, between_s)
        else:
            data = await exchange.read_some(between_s)
