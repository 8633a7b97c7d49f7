"""Relaying a decode worker's answer to the client, its bytes unchanged.

A stream (server-sent events) is passed on as it comes, up to the end of the last whole event. If the worker
breaks off inside an event, the client can still read the error event that follows. Any other answer is passed
on when it is whole, or when it is long. Nothing is sent before the body's first byte; until
then another worker can be tried.
The pieces of a running stream go from one connection to the other without waking the call's task. The task
handles a slow client and the stream's end.
"""

from __future__ import annotations

import time

from pdserve.router.dispatch.stream_marks import StreamMarks
from pdserve.router.request import timing
from pdserve.router.request.answer import STREAM_HEADERS
from pdserve.router.request.call import Call
from pdserve.router.upstream.response import Response

HELD_BYTES = 8 * 1024 * 1024
"""A longer answer goes to the client as it comes, and another worker can no longer be tried."""
TAIL_BYTES = 4096
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
_OF_STREAMS = frozenset(name for name, _ in STREAM_HEADERS)


def is_event_stream(exchange: Response) -> bool:
    """Whether the answer is a stream of server-sent events."""
    for name, value in exchange.headers:
        if name == b"content-type":
            return value.startswith(b"text/event-stream")
    return False


def passed_headers(exchange: Response) -> list[tuple[bytes, bytes]]:
    """The worker's headers that go to the client."""
    return [pair for pair in exchange.headers if pair[0] not in _OWN_HEADERS]


async def relay_whole(call: Call, response: Response, first_byte_s: float, between_s: float) -> None:
    """Pass on an answer that is not a stream, once it is whole or `HELD_BYTES` of it are here. Raises
    UpstreamError; `call.answer.is_started` says whether anything was sent.
    """
    if response.complete:
        body = response.take()
    else:
        body = await response.read_some(first_byte_s)
        if not response.at_end:
            body = await _read_much(response, body, between_s)
    if response.at_end:
        call.answer.start(response.status, passed_headers(response), len(body))
        await call.answer.write(body, more=False)
    else:
        await _relay_long(call, response, body, between_s)


async def _read_much(response: Response, body: bytes, between_s: float) -> bytes:
    parts, size = [body], len(body)
    while not response.at_end and size <= HELD_BYTES:
        parts.append(await response.read_some(between_s))
        size += len(parts[-1])
    return b"".join(parts)


async def _relay_long(call: Call, response: Response, body: bytes, between_s: float) -> None:
    """Pass on a long answer as it comes. If the worker breaks off, the client's connection is closed before
    the answer's end.
    """
    lengths = [int(value) for name, value in response.headers if name == b"content-length"]
    call.answer.start(response.status, passed_headers(response), lengths[0] if lengths else None)
    call.answer.is_stream = False  # also where it goes in chunks: its end cannot be told as an event
    while not response.at_end:
        cut = max(body.rfind(b"}") + 1, len(body) - TAIL_BYTES)  # the meter reads whole numbers
        if cut > 0:
            await call.answer.write(body[:cut], more=True)
        body = body[cut:] + await response.read_some(between_s)
    await call.answer.write(body, more=False)


async def relay_events(
    call: Call, response: Response, marks: StreamMarks, data: bytes, between_s: float
) -> None:
    """Pass on a stream, of which `data` has been read. Raises UpstreamError when the worker breaks off;
    `call.answer.is_started` says whether anything was sent.
    """
    answer = call.answer
    client, take, write_now = answer.client, marks.take, answer.write_now

    def pass_on(data: bytes) -> bool:
        if not client.takes_now:
            return False
        if ready := take(data, False):
            write_now(ready)
        return True

    while True:
        at_end = response.at_end
        ready = marks.take(data, at_end)
        if ready or at_end:
            if not answer.is_started:
                _start_stream(call, response)
            await answer.write(ready, more=not at_end)
            if at_end:
                return
        if answer.is_started:
            data = await response.give(pass_on, between_s)
        else:
            data = await response.read_some(between_s)


def _start_stream(call: Call, response: Response) -> None:
    """The first event is here: send the head, with the parts of the time until now."""
    now_s = time.monotonic()
    timing.finish(call.parts_s, call.asked_s, timing.pull_s(response.headers), call.started_s, now_s)
    headers = [pair for pair in passed_headers(response) if pair[0] not in _OF_STREAMS]
    headers += (*STREAM_HEADERS, (timing.TIMING_HEADER, timing.timing(call.parts_s)))
    call.answer.start(response.status, headers, None)
    call.phase = "stream"
