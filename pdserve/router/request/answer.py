"""The answer of one call on its way to the client: head, body, errors, and how much of it was sent.

    nothing sent --start--> started --write(more=False)--> complete
    nothing sent --early_head_s--> early --start--> started

A client that has asked for a stream, and proxies on its way, wait for a head and for bytes. So the head of
a stream that has not begun after `deadlines.early_head_s` goes out early, and while nothing comes a comment
follows each `KEEP_ALIVE_S`. An early head promises nothing but a stream: another worker can still be tried,
and what else would be an answer of its own, like a worker's 400, becomes an event.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from typing import Final

from pdserve.errors import RequestError
from pdserve.router.api.errors import (
    RETRY_STATUSES,
    ErrorForm,
    convert_error,
    error_event,
    error_headers,
    error_of,
    error_type,
    refused_stream,
)
from pdserve.router.request.token_usage import Meter
from pdserve.router.server.request_cycle import Client, Headers
from pdserve.router.tenants.tenant import TenantState, rate_headers

JSON = b"application/json"
PLAN_HEADER = b"x-pdserve-plan"
PREFILL_HEADER = b"x-pdserve-prefill"
MISS_HEADER = b"x-pdserve-miss"
KEEP_ALIVE_S = 12.0
"""Proxies give up after 60 s without a byte, some after 15 s."""
KEEP_ALIVE: Final = b": keep-alive\n\n"
EVENT_STREAM: Final = b"text/event-stream; charset=utf-8"
STREAM_HEADERS: Final = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
"""Of every stream of events: nginx and others would keep it back until it is whole, or store it."""
_FIGURES = re.compile(rb"\([^)]*\)")


_LINE_END: Final = ord("\n")


class Answer:
    """The way back to one client."""

    __slots__ = (
        "_ends_line",
        "_time",
        "client",
        "deadline_s",
        "decode_id",
        "error_form",
        "is_complete",
        "is_early",
        "is_started",
        "is_stream",
        "meter",
        "missed",
        "more_headers",
        "plan_words",
        "prefill_headers",
        "request_id",
        "shows_insides",
        "started_s",
        "status",
        "tenant",
    )

    def __init__(self, client: Client, request_id: bytes, error_form: ErrorForm = "openai") -> None:
        self.client = client
        self.error_form = error_form
        self.request_id = request_id
        self.is_started = False
        """The status was sent, and for a stream its first event."""
        self.is_early = False
        """The head of a stream was sent before it began."""
        self.deadline_s = math.inf
        """When the client must get a byte, on the loop's clock; see `deadlines.Watched`."""
        self._time = asyncio.get_running_loop().time
        self._ends_line = True
        """A comment can follow what was sent."""
        self.is_complete = False
        """The last byte was sent."""
        self.status = 0
        """0 until it was sent."""
        self.started_s = 0.0
        """When the status was sent, or a stream began: by time.monotonic()."""
        self.is_stream = False
        """The answer is a stream of events: an error can still be told as an event."""
        self.meter: Meter | None = None
        """Counts the answer's tokens, once the call was let in."""
        self.tenant: TenantState | None = None
        """Whose rates the answer tells, once it is known."""
        self.more_headers: Headers = []
        """Headers of every answer to this request."""
        self.plan_words = b""
        self.shows_insides = True
        """The client may see where the workers are, and how busy."""
        self.prefill_headers: Headers = []
        """Headers that name the prefill worker, and what it found cached."""
        self.missed: list[bytes] = []
        """Why tokens of the prompt were not found: what its client changed, and what became of pages."""
        self.decode_id = b""
        """The worker that answers."""

    @property
    def worker_headers(self) -> Headers:
        """Headers that name the workers, and what they found."""
        headers = [*self.prefill_headers, (MISS_HEADER, b", ".join(self.missed))]
        if not self.missed:
            del headers[-1]
        if self.decode_id:
            headers.append((b"x-pdserve-decode", self.decode_id))
        return headers

    def _insides(self) -> Headers:
        """What the client may see of the plan and of the workers."""
        if self.shows_insides:
            return [(PLAN_HEADER, self.plan_words), *self.worker_headers]
        return [
            (PLAN_HEADER, _FIGURES.sub(b"", self.plan_words)),
            *(pair for pair in self.worker_headers if pair[0] not in (PREFILL_HEADER, b"x-pdserve-decode")),
        ]

    def start(self, status: int, headers: Headers, length: int | None, *, closes: bool = False) -> None:
        """Send the status and `headers`, with the router's own added. `length`: of the body in bytes; None: a
        stream of events. `closes`: the connection ends with the answer.
        """
        if not self.is_early:
            self._send_head(status, headers, length, closes=closes)
        self.is_started = True
        self.started_s = time.monotonic()
        self.status = status
        self.is_stream = length is None

    def _send_head(self, status: int, headers: Headers, length: int | None, *, closes: bool = False) -> None:
        headers.append((b"x-request-id", self.request_id))
        headers += self.more_headers
        if (tenant := self.tenant) is not None and tenant.has_rates:
            headers += rate_headers(tenant, self.error_form, self._time(), time.time())
        if self.plan_words:
            headers += self._insides()
        self.client.start(status, headers, length, closes=closes)

    def await_events(self, early_head_s: float) -> None:
        """A stream is to come: its head goes out after `early_head_s`, without waiting for an event. The
        owner has it watched by `Deadlines`.
        """
        self.deadline_s = self._time() + early_head_s

    def stop_awaiting(self) -> None:
        """What comes is no stream."""
        self.deadline_s = math.inf

    def expire(self) -> None:
        """The client has waited long enough."""
        self.deadline_s = self._time() + KEEP_ALIVE_S
        if not (self.is_started or self.is_early) and self.client.takes_now:
            self.is_early = True
            self._send_head(200, [(b"content-type", EVENT_STREAM), *STREAM_HEADERS], None)
        self.keep_alive()

    def keep_alive(self) -> None:
        """Send a comment, where a stream has its head and its client can take one."""
        is_open = (self.is_early or self.is_stream) and not self.is_complete
        if is_open and self._ends_line and self.client.takes_now:
            self.client.write_now(KEEP_ALIVE)

    async def write(self, body: bytes, more: bool) -> None:
        """Send a piece of the body; waits while the client is slow to read."""
        if self.meter is not None:
            if self.is_stream:
                self.meter.count(body)
            else:
                self.meter.count_whole(body)
        if body:
            self._ends_line = body[-1] == _LINE_END
        await self.client.write(body, more)
        self.deadline_s = self._time() + KEEP_ALIVE_S
        if not more:
            self.is_complete = True

    def write_now(self, body: bytes) -> None:
        """As `write`, where the client `takes_now`, and more follows."""
        if self.meter is not None:
            self.meter.count(body)
        self._ends_line = body[-1] == _LINE_END
        self.client.write_now(body)
        self.deadline_s = self._time() + KEEP_ALIVE_S

    async def send(
        self, status: int, body: bytes, *more_headers: tuple[bytes, bytes], closes: bool = False
    ) -> None:
        """Send a whole JSON answer."""
        self.start(status, [(b"content-type", JSON), *more_headers], len(body), closes=closes)
        await self.write(body, more=False)

    async def send_error(self, error: RequestError) -> None:
        """Send an error of the router."""
        body = error_of(error, self.error_form)
        if self.is_early:
            await self._refuse_stream(error.status, body)
        else:
            await self.send(error.status, body, *error_headers(error))

    async def send_worker_error(self, status: int, body: bytes) -> None:
        """Send a worker's error answer, in the endpoint's form."""
        body = convert_error(status, body, self.error_form)
        if self.is_early:
            await self._refuse_stream(status, body)
        else:
            more = ((b"retry-after", b"1"),) if status in RETRY_STATUSES else ()
            await self.send(status, body, *more)

    async def _refuse_stream(self, status: int, body: bytes) -> None:
        """Tell an error where only the head of a stream was sent. `status` is what metrics and logs say."""
        self.start(status, [], None)
        self.is_stream = False  # of it there was nothing
        await self.client.write(refused_stream(body, self.error_form), more=False)
        self.is_complete = True

    async def break_off(self, status: int, message: str, code: str) -> None:
        """End the answer with an error in whatever way is still open: an answer, an error event, or the end
        of the connection.
        """
        if not self.is_started:
            await self.send_error(RequestError(status, message, type_=error_type(status), code=code))
        elif self.is_stream and not self.is_complete:
            await self.write(error_event(status, message, code, self.error_form), more=False)
