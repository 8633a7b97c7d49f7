"""The answer of one call on its way to the client: head, body, errors, and how much of it was sent.

nothing sent --start--> started --write(more=False)--> complete
"""

from __future__ import annotations

import asyncio
import re
import time

from pdserve.errors import RequestError
from pdserve.router.api.errors import (
    RETRY_STATUSES,
    ErrorForm,
    convert_error,
    error_event,
    error_headers,
    error_of,
    error_type,
)
from pdserve.router.request.token_usage import Meter
from pdserve.router.server.client import Client, Headers
from pdserve.router.tenants.rate_headers import rate_headers
from pdserve.router.tenants.tenant import TenantState

JSON = b"application/json"
PLAN_HEADER = b"x-pdserve-plan"
PREFILL_HEADER = b"x-pdserve-prefill"
_FIGURES = re.compile(rb"\([^)]*\)")


class Answer:
    """The way back to one client."""

    __slots__ = (
        "client",
        "decode_id",
        "error_form",
        "is_complete",
        "is_started",
        "is_stream",
        "meter",
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
        """The status was sent."""
        self.is_complete = False
        """The last byte was sent."""
        self.status = 0
        """0 until it was sent."""
        self.started_s = 0.0
        """When the status was sent, on the loop's clock."""
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
        self.decode_id = b""
        """The worker that answers."""

    @property
    def worker_headers(self) -> Headers:
        """Headers that name the workers."""
        if not self.decode_id:
            return self.prefill_headers
        return [*self.prefill_headers, (b"x-pdserve-decode", self.decode_id)]

    def _insides(self) -> Headers:
        """What the client may see of the plan and of the workers."""
        if self.shows_insides:
            return [(PLAN_HEADER, self.plan_words), *self.worker_headers]
        return [
            (PLAN_HEADER, _FIGURES.sub(b"", self.plan_words)),
            *(header for header in self.prefill_headers if header[0] != PREFILL_HEADER),
        ]

    def start(self, status: int, headers: Headers, length: int | None, *, closes: bool = False) -> None:
        """Send the status and `headers`, with the router's own added. `length`: of the body in bytes; None: a
        stream of events. `closes`: the connection ends with the answer.
        """
        self.is_started = True
        self.started_s = asyncio.get_running_loop().time()
        self.status = status
        self.is_stream = length is None
        headers.append((b"x-request-id", self.request_id))
        headers += self.more_headers
        if (tenant := self.tenant) is not None and tenant.has_rates:
            headers += rate_headers(tenant, self.error_form, self.started_s, time.time())
        if self.plan_words:
            headers += self._insides()
        self.client.start(status, headers, length, closes=closes)

    async def write(self, body: bytes, more: bool) -> None:
        """Send a piece of the body; waits while the client is slow to read."""
        if self.meter is not None:
            if self.is_stream:
                self.meter.count(body)
            else:
                self.meter.count_whole(body)
        await self.client.write(body, more)
        if not more:
            self.is_complete = True

    def write_now(self, body: bytes) -> None:
        """As `write`, where the client `takes_now`, and more follows."""
        if self.meter is not None:
            self.meter.count(body)
        self.client.write_now(body)

    async def send(
        self, status: int, body: bytes, *more_headers: tuple[bytes, bytes], closes: bool = False
    ) -> None:
        """Send a whole JSON answer."""
        self.start(status, [(b"content-type", JSON), *more_headers], len(body), closes=closes)
        await self.write(body, more=False)

    async def send_error(self, error: RequestError) -> None:
        """Send an error of the router."""
        await self.send(error.status, error_of(error, self.error_form), *error_headers(error))

    async def send_worker_error(self, status: int, body: bytes) -> None:
        """Send a worker's error answer, in the endpoint's form."""
        more = ((b"retry-after", b"1"),) if status in RETRY_STATUSES else ()
        await self.send(status, convert_error(status, body, self.error_form), *more)

    async def break_off(self, status: int, message: str, code: str) -> None:
        """End the answer with an error in whatever way is still open: an answer, an error event, or the end
        of the connection.
        """
        if not self.is_started:
            await self.send_error(RequestError(status, message, type_=error_type(status), code=code))
        elif self.is_stream and not self.is_complete:
            await self.write(error_event(status, message, code, self.error_form), more=False)
