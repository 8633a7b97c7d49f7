"""One client request on a hot route: its state, its way back to the client, and its end when the client
leaves.

A `Call` runs in the task that the server gave it. When the client goes away (see `Client.watch`) that task is
cancelled, in whatever phase it is; what the phase holds (a connection to a worker, a count of load) is
released by its `finally`. The total deadline ends a call in the same way.
"""

from __future__ import annotations

import asyncio
import random
import re
from typing import Literal

from pdserve.errors import RequestError
from pdserve.router.api.endpoints import ENDPOINTS
from pdserve.router.api.errors import convert_error, error_event, error_of, error_type
from pdserve.router.placement.request_facts import RequestFacts
from pdserve.router.request.token_usage import Meter
from pdserve.router.server.client import Client, Headers
from pdserve.router.tenants.tenant import TenantState
from pdserve.tracing import PASSED_ON, Trace

Phase = Literal["body", "plan", "queue", "settle", "prefill", "decode", "stream"]

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")
_FIGURES = re.compile(rb"\([^)]*\)")
_FIELD_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]{1,1024}")
JSON = b"application/json"


def request_id(given: bytes) -> bytes:
    """The id of a request: what its client gave it, if short and plain, else a new one (no secret)."""
    return given if given and _REQUEST_ID.fullmatch(given) else b"%024x" % random.getrandbits(96)


class Call:
    """The state of one request."""

    __slots__ = (
        "asked_s",
        "body",
        "client",
        "deadline_s",
        "end",
        "endpoint",
        "facts",
        "first_byte_s",
        "headers",
        "is_complete",
        "is_late",
        "is_sse",
        "is_started",
        "meter",
        "model",
        "parts_s",
        "phase",
        "plan_words",
        "planned_s",
        "prefilled",
        "prompt_counted",
        "queued_tokens",
        "request_id",
        "shows_figures",
        "started_s",
        "status",
        "task",
        "tenant",
        "trace",
        "trial",
        "upstream_headers",
        "workers",
    )

    def __init__(self, client: Client, now_s: float, deadline_s: float) -> None:
        self.client = client
        self.endpoint = ENDPOINTS[client.path]
        self.headers = dict(client.headers)
        self.started_s = now_s
        self.deadline_s = deadline_s
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.request_id = request_id(self.headers.get(b"x-request-id", b""))
        self.upstream_headers = self._headers_for_workers()
        self.body = b""
        self.facts = RequestFacts(self.endpoint)
        self.tenant: TenantState
        self.model: str
        """The served model that it means."""
        self.meter: Meter | None = None
        """Counts the tokens of the answer, once the call was let in."""
        self.phase: Phase = "body"
        self.end: Literal["client", "deadline"] | None = None
        """Who cancelled the call, if not the server."""
        self.is_started = False
        """The status has been sent."""
        self.is_complete = False
        """The last byte has been sent."""
        self.is_late = False
        """Given up because a worker's answer did not begin, or did not come to its end, in time."""
        self.is_sse = False
        self.first_byte_s = 0.0
        """When the status was sent, on the loop's clock; 0 before that."""
        self.trace: Trace | None = None
        self.planned_s = 0.0
        """When it was let in, and its plan was begun."""
        self.asked_s = 0.0
        """When the decode worker was asked, the first of several."""
        self.parts_s: dict[str, float] = {}
        """Of the time to the first token of a stream: `metric_names.PARTS`."""
        self.status = 0
        self.plan_words = b""
        self.shows_figures = True
        """The client may see how much the workers have to do."""
        self.prefilled = b""
        """Header for the decode worker: what was found cached by prefill, or by the first that streamed."""
        self.prompt_counted = False
        """Where its prompt's tokens came from has been counted: the first worker that had it counts."""
        self.queued_tokens = 0
        """Prompt tokens that count as waiting at the decode worker."""
        self.trial = 0
        """Of the decode worker, see `Fleet.on_selected`."""
        self.workers: list[tuple[bytes, bytes]] = []
        """Response headers that name the workers."""

    def header(self, name: str) -> str | None:
        """A request header's value."""
        value = self.headers.get(name.encode("ascii"))
        return None if value is None else value.decode("latin-1")

    def pass_on(self, headers: dict[bytes, bytes]) -> None:
        """Workers get these headers in place of the client's own."""
        self.headers.update(headers)
        self.upstream_headers = self._headers_for_workers()

    def _headers_for_workers(self) -> bytes:
        content_type = self.headers.get(b"content-type", JSON)
        if not _FIELD_VALUE.fullmatch(content_type):
            content_type = JSON
        lines = b"content-type: %b\r\nx-request-id: %b\r\n" % (content_type, self.request_id)
        for name in PASSED_ON:
            value = self.headers.get(name)
            if value is not None and _FIELD_VALUE.fullmatch(value):
                lines += b"%b: %b\r\n" % (name, value)
        return lines

    # --- the end of it

    def expire(self) -> None:
        """The total deadline has passed."""
        self.stop("deadline")

    def stop(self, reason: Literal["client", "deadline"]) -> None:
        """Cancel the call, once."""
        if self.end is None and not self.is_complete:
            self.end = reason
            self.task.cancel()

    def on_client_gone(self) -> None:
        """The client went away."""
        self.stop("client")

    # --- the way back

    def start(self, status: int, headers: Headers, length: int | None, *, closes: bool = False) -> None:
        """Begin the answer (see `Client.start`), headers of ours added."""
        self.is_started = True
        self.first_byte_s = asyncio.get_running_loop().time()
        self.status = status
        headers.append((b"x-request-id", self.request_id))
        if words := self.plan_words:
            headers.append((b"x-pdserve-plan", words if self.shows_figures else _FIGURES.sub(b"", words)))
            headers += self.workers
        self.client.start(status, headers, length, closes=closes)

    async def write(self, body: bytes, more: bool) -> None:
        """Send a piece of the body; waits while the client is slow to read."""
        if self.meter is not None:
            self.meter.count(body)
        await self.client.write(body, more)
        self.is_complete = not more

    def write_now(self, body: bytes) -> None:
        """As `write`, where the client `takes_now`, and more follows."""
        if self.meter is not None:
            self.meter.count(body)
        self.client.write_now(body)

    async def answer(
        self, status: int, body: bytes, *more_headers: tuple[bytes, bytes], closes: bool = False
    ) -> None:
        """Send a whole answer, JSON."""
        self.start(status, [(b"content-type", JSON), *more_headers], len(body), closes=closes)
        await self.write(body, more=False)

    async def answer_error(self, error: RequestError) -> None:
        """Send an error that the router found itself, in OpenAI's form."""
        more = ((b"retry-after", b"%d" % error.retry_after_s),) if error.status in (429, 503) else ()
        await self.answer(error.status, error_of(error), *more)

    async def answer_worker_error(self, status: int, body: bytes) -> None:
        """Send a worker's error answer on, in OpenAI's form."""
        more = ((b"retry-after", b"1"),) if status in (429, 503) else ()
        await self.answer(status, convert_error(status, body), *more)

    async def break_off(self, status: int, message: str, code: str) -> None:
        """End the call with an error in whatever way is still open: an answer, an error event, or the
        connection.
        """
        if not self.is_started:
            await self.answer_error(RequestError(status, message, type_=error_type(status), code=code))
        elif self.is_sse and not self.is_complete:
            await self.write(error_event(message, error_type(status), code), more=False)
