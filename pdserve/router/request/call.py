"""One request while it is answered: its facts, its times, its spans, where its tokens came from.

Where the time to a stream's first token went: what workers say in their answers, and what the client gets.
Pure.

    server-timing: queue;dur=1.2, pull;dur=3.4, compute;dur=20.1  milliseconds (W3C Server Timing)

The client of a stream gets this header with the router's own parts (`metrics.names.PARTS`), so a browser's
developer tools show them.

Where a prompt's tokens came from, as workers say in their answers' headers. Pure.

    x-pdserve-cached: device=0, host=0, pool=704, computed=17     prompt tokens

The client gets a decode worker's header as it is, and beside it `x-pdserve-prefill-cached` with what the
prefill worker found. `x-pdserve-miss` says what its client changed since the session's last turn
(`sessions.history`), and why the prefill worker did not find the rest, as that reports it:

    x-pdserve-miss: messages_changed=700, evicted=512;age_s=31.4, never_stored=64

One client request: its state, and its end when the client leaves or the time is up.

A `Call` runs in the task that the server gave it. When the client leaves (see `Client.watch`) or the total
deadline passes, that task is cancelled in whatever phase it is. The `finally` of each phase releases what the
phase holds: a connection to a worker, a count of load.

The spans of a request at the router, made from what the call wrote down on its way.

    POST /v1/chat/completions                                        the router's first span
      queue | plan | settle | prefill | publish | first token | stream

`prefill` and `publish` are the prefill worker's work and its wait for the commit in the pool, `first token`
what the client waited for the decode worker, pulling pages included. Workers' own spans are beside them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Final, Literal

from pdserve.router.api.endpoints import ENDPOINTS
from pdserve.router.metrics.names import PARTS, TIERS
from pdserve.router.placement.planner import RequestFacts
from pdserve.router.request.answer import JSON, Answer
from pdserve.router.server.request_cycle import Client
from pdserve.router.tenants.tenant import TenantState
from pdserve.tracing import PASSED_ON, Trace, Tracer

TIMING_HEADER = b"server-timing"


def pull_s(headers: Iterable[tuple[bytes, bytes]]) -> float:
    """How long the worker waited for pages of the pool. 0: it does not say."""
    for name, value in headers:
        if name == TIMING_HEADER:
            pull_ms = parse_timing(value.decode("latin-1")).get("pull")
            if pull_ms is not None:
                return pull_ms / 1e3
    return 0.0


def finish_parts(
    parts_s: dict[str, float], asked_s: float, pulled_s: float, started_s: float, now_s: float
) -> None:
    """Complete `parts_s` when the first token has come. `asked_s`: when the decode worker was asked.
    `started_s`: when the request arrived. No report of a worker makes a part negative.
    """
    waited_s = max(0.0, now_s - asked_s)
    if pulled_s > 0:
        pulled_s = parts_s["pull"] = min(pulled_s, waited_s)
    parts_s["decode"] = waited_s - pulled_s
    parts_s["router"] = max(0.0, now_s - started_s - sum(parts_s.values()))


def server_timing(parts_s: Mapping[str, float]) -> bytes:
    """The value of the header."""
    return ", ".join([f"{p};dur={1e3 * parts_s[p]:.1f}" for p in PARTS if p in parts_s]).encode()


def parse_timing(header: str) -> dict[str, float]:
    """Milliseconds by part, from a value of the header."""
    entries = [entry.partition(";dur=") for entry in header.split(",")]
    return {part.strip(): finite_number(dur) for part, found, dur in entries if found}


def finite_number(text: bytes | str) -> float:
    """The number in `text`. 0 for text that is no number, or a negative or huge one."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 <= value < 1e12 else 0.0


CACHED_HEADER = b"x-pdserve-cached"


PREFILL_CACHED_HEADER = b"x-pdserve-prefill-cached"
_WORDS = ", ".join(f"{tier}=%d" for tier in TIERS).encode()


def cached_tokens(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, int]:
    """Prompt tokens by tier. A tier that the worker does not name is missing."""
    for name, value in headers:
        if name == CACHED_HEADER:
            return parse_cached(value.decode("latin-1"))
    return {}


def parse_cached(header: str) -> dict[str, int]:
    """Tokens by tier from a value of either header. A count that is no number becomes 0."""
    entries = [entry.strip().partition("=") for entry in header.split(",")]
    return {tier: int(finite_number(count)) for tier, _, count in entries if tier in TIERS}


def cached_words(tokens: Mapping[str, int]) -> bytes:
    """The header's value for `tokens` of all `TIERS`, in their order."""
    return _WORDS % tuple(tokens.values())


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
        """Header lines with what the client wants of caches."""
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

    def keep_apart(self) -> None:
        """Of two tenants that use one id, workers must not take one request for the other's."""
        self.worker_request_id = b"%b:%b" % (self.tenant.name.encode("ascii"), self.request_id)
        self.upstream_headers = self._headers_for_workers()

    def keep(self, seconds: int) -> None:
        """Have the pool keep the conversation."""
        self.keep_line += b"x-pdserve-keep: %d\r\n" % seconds
        self.upstream_headers = self._headers_for_workers()

    def diagnose(self, change: bytes) -> None:
        """Have the worker say in its answer what the client changed since its last turn; empty: nothing."""
        self.keep_line += b"x-pdserve-changed: %b\r\n" % (change or b"none")
        self.upstream_headers = self._headers_for_workers()

    def finish(self, shared_tokens: int) -> None:
        """No request of the session follows. `shared_tokens`: the first ones, which others may use."""
        self.keep_line += b"x-pdserve-final: %d\r\n" % shared_tokens
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


_ENDS: Final[dict[End | None, str]] = {"client": "the client left", "deadline": "the deadline passed"}
STAGES = ("settle", "prefill", "publish")


def begin_trace(tracer: Tracer, call: Call) -> None:
    """The call has come."""
    call.trace = tracer.begin(
        f"POST {call.endpoint.path}",
        call.headers,
        call.started_s,
        **{"url.path": call.endpoint.path, "pdserve.request_id": call.request_id.decode("ascii")},
    )
    call.pass_on(call.trace.headers)


def end_trace(call: Call, now_s: float) -> None:
    """The call is over, in whatever way."""
    trace, parts_s = call.trace, call.parts_s
    assert trace is not None
    begun_s = call.planned_s or now_s
    queued_s = parts_s.get("queue", 0.0)
    if queued_s:
        trace.part("queue", begun_s - queued_s, begun_s)
    staged_s = sum(parts_s.get(stage, 0.0) for stage in STAGES)
    asked_s = call.asked_s or begun_s + staged_s
    if call.planned_s:
        trace.part("plan", begun_s, asked_s - staged_s, words=call.answer.plan_words.decode("ascii"))
    at_s = asked_s - staged_s  # the stages follow each other, and the decode worker is asked at once
    for stage in STAGES:
        if stage in parts_s:
            trace.part(stage, at_s, at_s + parts_s[stage])
            at_s += parts_s[stage]
    if call.asked_s:
        trace.part("first token", call.asked_s, call.answer.started_s or now_s)
    if call.answer.is_stream and call.answer.started_s:
        trace.part("stream", call.answer.started_s, now_s)
    workers = {name.decode(): value.decode() for name, value in call.answer.worker_headers}
    trace.end(
        now_s,
        _error(call),
        **{
            "http.response.status_code": call.answer.status or None,
            "pdserve.model": call.facts.model,
            **workers,
        },
    )


def _error(call: Call) -> str:
    if call.end in _ENDS:
        return _ENDS[call.end]
    if call.answer.status >= 500 or not call.answer.is_started:
        return f"status {call.answer.status}"
    return "" if call.answer.is_complete else "broken off"
