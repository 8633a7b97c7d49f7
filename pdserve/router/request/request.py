"""One request to an endpoint that workers answer: what is known of it, where it is, and its answer.

The coroutine of `proxy.handle` serves it, driven by the workers' connections (`http.driven`). When the client
leaves, or the total time is up, that coroutine is cancelled in whatever phase it is; the `finally` of each
phase releases what the phase holds: a connection to a worker, a count of load.

The answer:

    nothing sent --answer--> started --last piece--> complete
    nothing sent --early_head_s--> early --answer--> started

A client that has asked for a stream, and proxies on its way, wait for a head and for bytes. So the head of
a stream that has not begun after `deadlines.early_head_s` goes out early, and while nothing comes a comment
follows each `KEEP_ALIVE_S`. An early head promises nothing but a stream: another worker can still be tried,
and what else would be an answer of its own, like a worker's 400, becomes an event.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from binascii import hexlify
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import lru_cache
from time import monotonic
from typing import Any, Final, Literal

import msgspec

from pdserve.errors import RequestError
from pdserve.logs import served_request
from pdserve.router.api.endpoints import ENDPOINTS, Endpoint
from pdserve.router.api.errors import (
    RETRY_STATUSES,
    convert_error,
    error_event,
    error_headers,
    error_of,
    error_type,
    refused_stream,
)
from pdserve.router.fleet.worker import Worker
from pdserve.router.http.client_request import Channel, ClientRequest, Headers
from pdserve.router.http.driven import PAUSE
from pdserve.router.http.worker_connection import NOT_PASSED_ON, WorkerConnection
from pdserve.router.native.heads import joined
from pdserve.router.native.slots import copied
from pdserve.router.placement.planner import Plan, RequestFacts
from pdserve.router.request.reports import TIMING_HEADER, finish_parts, pull_s
from pdserve.router.request.stream_marks import StreamMarks
from pdserve.router.request.token_usage import Meter
from pdserve.router.sessions.table import SessionEntry
from pdserve.router.tenants.tenant import TenantState, rate_headers
from pdserve.tracing import PASSED_ON, Trace

JSON: Final = b"application/json"
KEEP_ALIVE_S = 12.0
"""Proxies give up after 60 s without a byte, some after 15 s."""
KEEP_ALIVE: Final = b": keep-alive\n\n"
STREAM_LINES: Final = b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"
"""Of every stream of events: nginx and others would keep it back until it is whole, or store it."""
_EARLY_LINES: Final = b"content-type: text/event-stream; charset=utf-8\r\n" + STREAM_LINES
_FIGURES: Final = re.compile(rb"\([^)]*\)")
_LINE_END: Final = ord("\n")
IDS: Final = 128

Phase = Literal["body", "plan", "queue", "settle", "prefill", "decode", "stream"]
End = Literal["client", "deadline", "worker"]
"""What ended a request early: the client left, its total time was up, or the worker did not answer in
time.
"""

_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")
_FIELD_VALUE: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]{1,1024}")
_NO_FACTS: Final = RequestFacts(next(iter(ENDPOINTS.values())))


_PASSED_ON: Final = frozenset(PASSED_ON)
_OWN_LINES: Final = (
    b"x-request-id: %b\r\nx-pdserve-plan: %b\r\nx-pdserve-prefill: %b\r\n"
    b"x-pdserve-prefill-cached: %b\r\nx-pdserve-decode: %b\r\n"
)
_HIDING_LINES: Final = b"x-request-id: %b\r\nx-pdserve-plan: %b\r\nx-pdserve-prefill-cached: %b\r\n"
"""The same for a client that may not see where the workers are."""
_JSON_LINES: Final = b"content-type: application/json\r\nx-request-id: %b\r\n"


def new_ids() -> list[bytes]:
    """Ids of requests for a process: the system is asked for random numbers by the hundred."""
    drawn = hexlify(os.urandom(12 * IDS))
    return [drawn[at : at + 24] for at in range(0, len(drawn), 24)]


def request_id(given: bytes | None, new: bytes = b"") -> bytes:
    """The id of a request: the client's own if it is short and plain, else `new`, or one that is made. Nobody
    must guess it: workers are asked about a request by its id.
    """
    if given and _REQUEST_ID.fullmatch(given):
        return given
    return new or hexlify(os.urandom(12))


@lru_cache(maxsize=1024)
def told(words: tuple[str, ...]) -> bytes:
    """What clients are told of a plan. Words of an added policy may hold anything."""
    said = ", ".join(words)
    if not said.isprintable():
        said = "".join(character if character.isprintable() else "?" for character in said)
    return said.encode("ascii", "replace")


@lru_cache(maxsize=1024)
def _without_figures(plan_words: bytes) -> bytes:
    """What clients are told of a plan that may not see how busy workers are."""
    return _FIGURES.sub(b"", plan_words)


class Losses(msgspec.Struct):
    """Workers that failed a request."""

    retry_until_s: float
    """Until then it may wait for a worker."""
    attempts: int = 0
    """Decode workers that got the request and failed."""
    tried: dict[str, int] = {}
    """Ids of the decode workers that failed, and what `Worker.probes_ready` was then."""


class Request(ClientRequest):
    """See the module."""

    __slots__ = (
        "_handle", "asked_s", "between_s", "cached_before", "decode_id", "end", "endpoint", "ends_line",
        "entered_s", "facts", "fields", "first_s", "found_tokens", "has_turn", "held_bytes", "is_begun",
        "is_early", "is_plain", "is_prompt_counted", "is_relayed", "is_started", "is_stream", "keep_line",
        "lane", "lines", "losses", "marks", "meter", "missed", "model", "more_headers", "outage_s",
        "parts_s", "phase", "plan", "plan_words", "planned_s", "prefill_cached", "prefill_id",
        "prefill_tokens", "prefills", "prompt", "published_s", "queued_tokens", "quiet_s", "rest",
        "room_line", "salt_line", "shows_insides", "started_s", "status", "streams", "suspects", "tenant",
        "total_s", "trace", "trial", "turn", "turns_line", "up", "used", "words", "worker", "worker_id",
    )  # fmt: skip

    _handle: Callable[[Request], Coroutine[Any, Any, None]]

    # what is known of it
    endpoint: Endpoint
    fields: dict[bytes, bytes]
    """The headers by name."""
    is_plain: bool
    """None of its headers says what the router looks at."""
    worker_id: bytes
    """The request's id at the workers."""
    lines: bytes
    """Header lines for workers."""
    tenant: TenantState | None
    """Whose it is, once that is known."""
    phase: Phase
    end: End | None
    trace: Trace | None
    salt_line: bytes
    """Header line for workers with the salt of the caches, unless the body has it."""
    keep_line: bytes
    """Header lines with what the client wants of caches."""
    started_s: float
    """When the request came. This and the other times are monotonic()'s: uvloop's clock, on which
    deadlines are, counts whole milliseconds and stands still in a callback.
    """
    total_s: float
    """When it must be over, on the loop's clock."""
    quiet_s: float
    """When its client must get a byte, on the same clock."""
    held_bytes: int
    """Bytes of the body, as counted by who bounds those of all requests."""
    facts: RequestFacts
    """What planning needs of it."""
    prompt: msgspec.Raw
    """As it stands in the body."""
    model: str
    """The served model that the request means, once it is known."""
    streams: bool
    """The client asks for a stream."""
    outage_s: float
    """How long it has waited because its model had no worker."""
    planned_s: float
    """When it was let in, and planning began."""
    lane: Any
    """Where it runs, once it was let in (`admission.queue.Lane`)."""
    entered_s: float
    """Since when, on the loop's clock."""
    asked_s: float
    """When the first decode worker was asked."""
    parts_s: dict[str, float]
    """Parts of the time to a stream's first token: `metrics.names.PARTS`."""

    # the plan, and what has become of it
    plan: Plan
    words: tuple[str, ...]
    """What decided, and what became of each stage: for the log and `x-pdserve-plan`."""
    plan_words: bytes
    """The words that the client is told."""
    worker: Worker
    """That is asked for the answer, where the request counts as load until it is over."""
    trial: int
    """Number of the circuit's trial that this is (`Fleet.on_selected`)."""
    queued_tokens: int
    """Of the prompt, those that wait to be computed there."""
    prefills: Worker | None
    """Where it counts as load of the prefill stage, with `prefill_tokens`."""
    prefill_tokens: int
    published_s: float | None
    """How long the prefill worker waited until the pages were in the pool, as it says."""
    has_turn: bool
    """It has the turn of suspects (`proxy.suspicion`)."""
    up: WorkerConnection | None
    """From where the answer comes."""
    turn: SessionEntry | None
    """The session's last turn that the answer is."""
    losses: Losses | None
    """Of workers; None: none has failed it."""
    suspects: tuple[Worker, ...]
    """Workers that answered with an error that may be theirs or the request's: see `Parts.on_failure`."""
    cached_before: bytes
    """Header lines for the decode worker: prompt tokens that were cached before, and the first token of the
    answer, where a prefill worker has sampled it.
    """
    room_line: bytes
    """Header line: where the decode worker meets a prefill worker (see `direct`)."""
    turns_line: bytes
    """Header line: which earlier answers have recorded tokens in the prompt that was prefilled."""
    prefill_id: bytes
    """The prefill worker."""
    prefill_cached: bytes
    """What it found cached, as a header says it."""
    missed: tuple[bytes, ...]
    """Why tokens of the prompt were not found: what its client changed, and what became of pages."""
    is_prompt_counted: bool
    """A worker has said where the prompt's tokens came from."""
    found_tokens: int
    """Of the prompt, those that a cache had, as the first worker said that knew."""
    decode_id: bytes
    """The worker that answers."""

    # the answer
    status: int
    """0 until it was sent."""
    is_early: bool
    """The head of a stream was sent before it began."""
    is_started: bool
    """The status was sent, and for a stream its first event."""
    is_stream: bool
    """The answer is a stream of events: an error can still be told as an event."""
    is_begun: bool
    """The worker that is asked now has begun to answer."""
    is_relayed: bool
    """Its stream has begun."""
    rest: bytes | None
    """Of a long answer that is no stream: what is kept back. None: it is none."""
    first_s: float
    """When the status was sent, or a stream began."""
    between_s: float
    """How long a worker may take for the next piece."""
    ends_line: bool
    """A comment can follow what was sent."""
    marks: StreamMarks | None
    """Of the answer, if it is a stream of events."""
    meter: Meter | None
    """Counts the answer's tokens, once the request was let in."""
    used: tuple[int, int]
    """Tokens of the prompt and of the answer, once it is over."""
    more_headers: Sequence[tuple[bytes, bytes]]
    """Headers of every answer to this request."""
    shows_insides: bool
    """The client may see where the workers are, and how busy."""

    @classmethod
    def blank(cls) -> Request:
        """One of which nothing is known: each request begins as its copy."""
        made = cls.__new__(cls)
        made.facts = _NO_FACTS
        made.phase = "body"
        made.version = "1.1"
        made.model = ""
        made.body = made.plan_words = made.cached_before = made.turns_line = b""
        made.decode_id = made.prefill_id = made.prefill_cached = b""
        made.salt_line = made.keep_line = made.room_line = b""
        made.words = made.suspects = made.missed = made.more_headers = ()
        made.held_bytes = made.status = made.queued_tokens = made.found_tokens = 0
        made.asked_s = made.first_s = made.outage_s = made.planned_s = made.total_s = 0.0
        made.quiet_s = math.inf
        made.used = 0, 0
        made.up = made.turn = made.rest = made.marks = made.meter = made.losses = made.prefills = None
        made.published_s = made.end = made.trace = made.tenant = made.waiter = None
        made._coroutine = made._awaited = None
        made.news = PAUSE
        made.more_body = made.keep_alive = made.ends_line = made.shows_insides = True
        made.has_head = made.is_complete = made.is_gone = made.is_told_to_go_on = made.streams = False
        made._is_chunked = made.has_chunks = False
        made.is_prompt_counted = made.is_started = made.is_stream = made.is_early = made.has_turn = False
        return made

    @classmethod
    def maker(
        cls, handle: Callable[[Request], Coroutine[Any, Any, None]], told_by: Collection[bytes] = ()
    ) -> Callable[[Channel, bytes, bytes, str, Headers], Request]:
        """Makes the requests that `handle` serves. It is called as the constructor of ClientRequest.
        `told_by`: headers that `handle` looks at.
        """
        telling, blanks = frozenset((*told_by, *PASSED_ON, b"x-request-id")), {}
        for path, endpoint in ENDPOINTS.items():
            blanks[path] = blank = cls.blank()
            blank._handle, blank.endpoint, blank.path = handle, endpoint, path

        def make(connection: Channel, method: bytes, target: bytes, path: str, headers: Headers) -> Request:
            made = copied(blanks[path])
            made.connection = connection
            made.method = method
            made.headers = headers
            made.fields = fields = dict(headers)
            made.parts_s = {}
            made.started_s = monotonic()
            made.is_plain = is_plain = telling.isdisjoint(fields)
            ids = connection.shared.ids
            if not ids:
                ids += new_ids()
            made.id = made.worker_id = id_ = ids.pop()
            if is_plain:
                made.lines = _JSON_LINES % id_
            else:
                made.id = made.worker_id = request_id(fields.get(b"x-request-id"), id_)
                made.lines = b""  # made when all is known of which they tell
            return made

        return make

    # --- its life

    def begin(self) -> None:
        """Serve it."""
        self._coroutine = self._handle(self)
        served_request.set(self.id)
        self.resume()

    def on_end(self) -> None:
        """It was served."""
        if not (self.is_complete or self.is_gone):
            self.connection.transport.close()

    def cancel(self, msg: str = "") -> None:
        """The server stops: not within a step of another request."""
        self.connection.loop.call_soon(self.throw, asyncio.CancelledError(msg))

    def stop(self, end: Literal["client", "deadline"]) -> None:
        """Cancel it, once."""
        if self.end in (None, "worker") and not self.is_complete:
            self.end = end
            self.throw(asyncio.CancelledError())

    def on_gone(self) -> None:
        """The client has left."""
        self.stop("client")

    @property
    def deadline_s(self) -> float:
        """For the sweep (`http.deadlines`)."""
        return min(self.total_s, self.quiet_s)

    def expire(self) -> None:
        """The total time is up, or the client has waited long enough for a byte."""
        now_s = self.connection.loop.time()
        if now_s >= self.total_s:
            self.stop("deadline")
            return
        if self.is_started and self.up is not None:
            spoke_s = self.up.deadline_s - self.between_s
            if now_s < spoke_s + KEEP_ALIVE_S < math.inf:
                self.quiet_s = spoke_s + KEEP_ALIVE_S
                return
        self.quiet_s = now_s + KEEP_ALIVE_S
        if not (self.is_started or self.is_early) and self.takes_now:
            self.plan_words = told(self.words)
            self.answer(200, _EARLY_LINES, None, is_early=True)
        self.send_comment()

    # --- for workers

    def set_lines(self) -> None:
        """Make the header lines for workers anew."""
        fields, lines = self.fields, _JSON_LINES % self.worker_id  # whatever the client says of its JSON
        if self.endpoint.is_form and _FIELD_VALUE.fullmatch(given := fields.get(b"content-type", b"")):
            lines = b"content-type: %b\r\nx-request-id: %b\r\n" % (given, self.worker_id)
        if not _PASSED_ON.isdisjoint(fields):
            for name in PASSED_ON:
                if name in fields and _FIELD_VALUE.fullmatch(fields[name]):
                    lines += b"%b: %b\r\n" % (name, fields[name])
        self.lines = lines + self.salt_line + self.keep_line

    # --- the answer

    @property
    def worker_headers(self) -> Headers:
        """Headers that name the workers, and what they found."""
        said = (
            (b"x-pdserve-prefill", self.prefill_id),
            (b"x-pdserve-prefill-cached", self.prefill_cached),
            (b"x-pdserve-miss", b", ".join(self.missed)),
            (b"x-pdserve-decode", self.decode_id),
        )
        return [pair for pair in said if pair[1]]

    def answer(
        self,
        status: int,
        lines: bytes,
        length: int | None,
        *,
        closes: bool = False,
        is_early: bool = False,
        now_s: float = 0.0,
    ) -> None:
        """Begin the answer with a status and these header lines, and the router's own. `length`: of the body
        in bytes; None: a stream of events. `closes`: the connection ends with the answer. `is_early`: only a
        head is sent now.
        """
        if is_early:
            self.is_early = True
        else:
            self.is_started, self.status, self.is_stream = True, status, length is None
            self.first_s = now_s or monotonic()
            if self.is_early:
                return
        tenant = self.tenant
        if (
            self.missed
            or self.more_headers
            or not (self.prefill_cached and self.decode_id)
            or (tenant is not None and tenant.has_rates)
        ):
            lines = self._own_lines(lines)
        elif self.shows_insides:  # nearly always, where there is a prefill stage: at once
            said = self.id, self.plan_words, self.prefill_id, self.prefill_cached, self.decode_id
            lines += _OWN_LINES % said
        else:
            lines += _HIDING_LINES % (self.id, _without_figures(self.plan_words), self.prefill_cached)
        self.start(status, lines, length, closes=closes)

    def _own_lines(self, lines: bytes) -> bytes:
        """These header lines and the router's own."""
        pairs = [(b"x-request-id", self.id), *self.more_headers]
        if self.tenant is not None and self.tenant.has_rates:
            now_s = self.connection.loop.time()
            pairs += rate_headers(self.tenant, self.endpoint.errors, now_s, time.time())
        if words := self.plan_words:
            pairs.append((b"x-pdserve-plan", words if self.shows_insides else _without_figures(words)))
            hidden = () if self.shows_insides else (b"x-pdserve-prefill", b"x-pdserve-decode")
            pairs += [pair for pair in self.worker_headers if pair[0] not in hidden]
        return lines + b"".join([b"%b: %b\r\n" % pair for pair in pairs])

    def relay(self, up: WorkerConnection) -> None:
        """Pass on what has come of a stream that has begun. The worker's connection calls this for each read:
        what it costs, each token costs.
        """
        connection, marks = self.connection, self.marks
        if connection.is_full or marks is None:
            up.pause()
            return
        data = b"".join(up.pieces)
        up.pieces.clear()
        up.deadline_s = up.clock.now_s + self.between_s
        ready = marks.take(data)
        if not ready or connection.is_closing:
            return
        if not self.is_started:
            self.begin_stream(up)
        if not marks.is_marked and self.meter is not None:  # else the marks tell what it has used
            self.meter.count(ready, self.ends_line)
        self.ends_line = ready[-1] == _LINE_END
        if self.has_chunks:
            connection.transport.write(b"%x\r\n%b\r\n" % (len(ready), ready))
        else:
            self.send(ready, more=True)

    def begin_stream(self, up: WorkerConnection) -> None:
        """The first event is here: make the head, with the parts of the time until now."""
        now_s, said = monotonic(), up.said.get(TIMING_HEADER)
        pulled_s = 0.0 if said is None else pull_s(said)
        timing = finish_parts(self.parts_s, self.asked_s, pulled_s, self.started_s, now_s)
        lines = b"%b%bserver-timing: %b\r\n" % (joined(up.pairs, NOT_PASSED_ON), STREAM_LINES, timing)
        self.answer(up.status, lines, None, now_s=now_s)
        self.phase = "stream"

    def on_writable(self) -> None:
        """The client reads again: let the worker go on, and pass on what has waited."""
        up = self.up
        if up is not None and up.is_paused:
            up.go_on(self.between_s)
            if up.pieces and up.sink is not None:
                up.sink(up)

    async def pass_on(self, body: bytes, *, more: bool) -> None:
        """Send a piece of the answer's body, once the client is not slow to read."""
        if body:
            meter = self.meter
            if meter is not None:
                if not self.is_stream:
                    meter.count_whole(body)
                elif self.marks is None or self.marks.used is None:
                    meter.count(body, self.ends_line)
            self.ends_line = body[-1] == _LINE_END
        elif more:
            return
        if self.connection.is_full:
            await self.connection.drained()
        self.send(body, more=more)
        if more:
            self.quiet_s = self.connection.loop.time() + KEEP_ALIVE_S

    def ask_within_answer(self) -> bool:
        """A comment changes no stream."""
        self.send_comment()
        return True

    def send_comment(self) -> None:
        """Send a comment, where a stream has its head and its client can take one."""
        is_open = (self.is_early or self.is_stream) and not self.is_complete
        if is_open and self.ends_line and self.takes_now:
            self.send(KEEP_ALIVE, more=True)

    async def send_json(
        self, status: int, body: bytes, more: Headers | None = None, *, closes: bool = False
    ) -> None:
        """Send a whole JSON answer."""
        lines = b"content-type: application/json\r\n"
        for pair in more or ():
            lines += b"%b: %b\r\n" % pair
        self.answer(status, lines, len(body), closes=closes)
        await self.pass_on(body, more=False)

    async def send_error(self, error: RequestError) -> None:
        """Send an error of the router."""
        body = error_of(error, self.endpoint.errors)
        if self.is_early:
            await self._refuse_stream(error.status, body)
        else:
            await self.send_json(error.status, body, error_headers(error))

    async def send_worker_error(self, status: int, body: bytes) -> None:
        """Send a worker's error answer, in the endpoint's form."""
        body = convert_error(status, body, self.endpoint.errors)
        if self.is_early:
            await self._refuse_stream(status, body)
        else:
            await self.send_json(status, body, [(b"retry-after", b"1")] if status in RETRY_STATUSES else None)

    async def _refuse_stream(self, status: int, body: bytes) -> None:
        """Tell an error where only the head of a stream was sent. `status` is what metrics and logs say."""
        self.answer(status, b"", None)
        self.is_stream = False  # of it there was nothing
        await self.write(refused_stream(body, self.endpoint.errors), more=False)

    async def break_off(self, status: int, message: str, code: str) -> None:
        """End the answer with an error in whatever way is still open: an answer, an error event, or the end
        of the connection.
        """
        if not self.is_started:
            await self.send_error(RequestError(status, message, type_=error_type(status), code=code))
        elif self.is_stream and not self.is_complete:
            await self.pass_on(error_event(status, message, code, self.endpoint.errors), more=False)
