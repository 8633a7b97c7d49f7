"""One client request: its state, and its end when the client leaves or the time is up.

A `Call` runs in the task that the server gave it. When the client leaves (see `Client.watch`) or the total
deadline passes, that task is cancelled in whatever phase it is. The `finally` of each phase releases what the
phase holds: a connection to a worker, a count of load.
"""

from __future__ import annotations

import os
import re
from typing import Literal

from pdserve.router.api.endpoints import ENDPOINTS
from pdserve.router.placement.request_facts import RequestFacts
from pdserve.router.request.answer import JSON, Answer
from pdserve.router.server.client import Client
from pdserve.router.tenants.tenant import TenantState
from pdserve.tracing import PASSED_ON, Trace

Phase = Literal["body", "plan", "queue", "settle", "prefill", "decode", "stream"]
End = Literal["client", "deadline", "worker"]
"""What ended a call early: the client left, its total time was up, or the worker did not answer in time."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")
_FIELD_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]{1,1024}")


def request_id(given: bytes) -> bytes:
    """The id of a request: the client's own if it is short and plain, else a new one that nobody guesses:
    workers are asked about a request by its id.
    """
    return given if given and _REQUEST_ID.fullmatch(given) else os.urandom(12).hex().encode()


class Call:
    """The state of one request."""

    __slots__ = (
        "answer",
        "asked_s",
        "body",
        "deadline_s",
        "end",
        "endpoint",
        "facts",
        "headers",
        "held_bytes",
        "keep_line",
        "model",
        "outage_s",
        "parts_s",
        "phase",
        "planned_s",
        "request_id",
        "salt_line",
        "started_s",
        "streams",
        "task",
        "tenant",
        "trace",
        "upstream_headers",
        "worker_request_id",
    )

    def __init__(self, client: Client, now_s: float, deadline_s: float) -> None:
        self.endpoint = ENDPOINTS[client.path]
        self.headers = dict(client.headers)
        self.started_s = now_s
        """When the request came. This and the other times are time.monotonic()'s: uvloop's clock, on which
        deadlines are, counts whole milliseconds and stands still in a callback.
        """
        self.deadline_s = deadline_s
        self.task = client.task
        self.request_id = request_id(self.headers.get(b"x-request-id", b""))
        self.worker_request_id = self.request_id
        """The request's id at the workers."""
        self.salt_line = b""
        """Header line with the salt of the caches, for workers; empty: none, or the body has it."""
        self.keep_line = b""
        """Header line that has the pool keep the conversation for a while."""
        self.upstream_headers = self._headers_for_workers()
        self.answer = Answer(client, self.request_id, self.endpoint.errors)
        self.body = b""
        self.held_bytes = 0
        """Bytes of the body, as counted by who bounds those of all requests."""
        self.facts = RequestFacts(self.endpoint)
        self.tenant: TenantState
        self.model = ""
        """The served model that the request means, once it is known."""
        self.streams = False
        """The client asks for a stream."""
        self.phase: Phase = "body"
        self.end: End | None = None
        self.trace: Trace | None = None
        self.outage_s = 0.0
        """How long it has waited because its model had no worker."""
        self.planned_s = 0.0
        """When the call was let in, and planning began."""
        self.asked_s = 0.0
        """When the first decode worker was asked."""
        self.parts_s: dict[str, float] = {}
        """Parts of the time to a stream's first token: `metrics.names.PARTS`."""

    def header(self, name: str) -> str | None:
        """A request header's value."""
        value = self.headers.get(name.encode("ascii"))
        return None if value is None else value.decode("latin-1")

    def keep_apart(self) -> None:
        """Of two tenants that use one id, workers must not take one request for the other's."""
        self.worker_request_id = b"%b:%b" % (self.tenant.name.encode("ascii"), self.request_id)
        self.upstream_headers = self._headers_for_workers()

    def keep(self, seconds: int) -> None:
        """Have the pool keep the conversation."""
        self.keep_line = b"x-pdserve-keep: %d\r\n" % seconds
        self.upstream_headers = self._headers_for_workers()

    def pass_on(self, headers: dict[bytes, bytes]) -> None:
        """Send workers these headers in place of the client's own."""
        self.headers.update(headers)
        self.upstream_headers = self._headers_for_workers()

    def _headers_for_workers(self) -> bytes:
        content_type = JSON  # whatever the client says of its JSON, or does not say
        if self.endpoint.is_form:
            given = self.headers.get(b"content-type", JSON)
            content_type = given if _FIELD_VALUE.fullmatch(given) else JSON
        lines = b"content-type: %b\r\nx-request-id: %b\r\n" % (content_type, self.worker_request_id)
        for name in PASSED_ON:
            value = self.headers.get(name)
            if value is not None and _FIELD_VALUE.fullmatch(value):
                lines += b"%b: %b\r\n" % (name, value)
        return lines + self.salt_line + self.keep_line

    def expire(self) -> None:
        """The total deadline has passed."""
        self.stop("deadline")

    def stop(self, end: Literal["client", "deadline"]) -> None:
        """Cancel the call, once."""
        if self.end in (None, "worker") and not self.answer.is_complete:
            self.end = end
            self.task.cancel()

    def on_client_gone(self) -> None:
        """The client has left."""
        self.stop("client")
