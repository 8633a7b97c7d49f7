"""The record of one HTTP request at a worker, and the middleware that opens it.

The engine names its requests itself: one HTTP request with `n = 3` makes several. It also forgets a request
once it is answered. A worker needs to know which engine requests belong to which HTTP request, what they
computed, and when the client left. So `RequestTracking` opens an `HttpRequest` in a context variable, and
the engine's side (`sglang/tokenizer_manager.py`) fills it in.

Where traces are wanted, a request has a span here, a child of the router's (`traceparent`):

    decode /v1/chat/completions        the worker's first span
      queue | pull | compute           from SGLang's times: waiting, reading from the pool, computing
      prefill, publish, pool wait ...  steps of a prefill worker (`tracing.timed`)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from pdserve.engine.contract.endpoints import GENERATING_PATHS
from pdserve.engine.http.cache_report import PREFILLED_HEADER, Reuse, parse_prefilled
from pdserve.engine.http.connection import AsgiApp, BrokenOff, Connection, Receive, Scope, Send
from pdserve.engine.http.marked_stream import MarkedStream
from pdserve.engine.http.timing import TIMING_HEADER, FirstToken
from pdserve.tracing import Tracer, current_trace

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = b"x-request-id"
KEEP_HEADER = b"x-pdserve-keep"
"""For how long the pool is to keep the pages of the conversation, in whole seconds."""
FINAL_HEADER = b"x-pdserve-final"
"""No request of the conversation follows. From its start on, so many tokens may be those of others too."""
SESSION_HEADER = b"x-pdserve-session"
"""The session that the request is of, and the number of its turn: `NAME NUMBER`."""
TURNS_HEADER = b"x-pdserve-turns"
"""Which segments of the prompt the prefill worker gave recorded tokens (`engine/turns`): a bit for each, as a
hexadecimal number."""
MAX_TURNS_DIGITS = 1024
FIRST_HEADER = b"x-pdserve-first"
"""The first token of the answer, as the prefill worker has sampled it (`sglang/first_tokens.py`)."""


class EngineRequest(Protocol):
    """One request as the engine's scheduler sees it."""

    rid: str
    input_ids: Sequence[int] | None  # the prompt's tokens; None until they are known
    extra_key: str | None
    cache_salt: str | None
    first_digest: str
    """Of a prefill: what the token behind the prompt follows from; empty: it is not said."""

    @property
    def was_sent(self) -> bool:
        """It went to the scheduler."""

    @property
    def is_finished(self) -> bool:
        """The scheduler has said its last of it."""

    def conversation(self) -> list[int]:
        """Tokens whose KV exists when the request is finished: prompt and output."""

    def abort(self) -> None:
        """Tell the scheduler to end it."""


@dataclass
class HttpRequest:
    """One HTTP request and the engine requests it made, by their ids."""

    request_id: str
    path: str
    reuse: Reuse = field(default_factory=lambda: Reuse([]))
    stream: MarkedStream | None = None  # where the caller may let another worker take over
    first: FirstToken | None = None  # None until it is there
    requests: dict[str, EngineRequest] = field(default_factory=dict)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """The client left before its answer was complete."""
    is_cut_short: bool = False
    """The client left while the engine computed, or this server's end aborted the request."""
    is_stopped: bool = False
    """This server's end aborted the request."""
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    started_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    """When its answer was complete: SGLang has more to do behind a stream, for seconds."""
    turns_wanted: int | None = None
    """The segments that get recorded tokens, a bit for each, as another worker has chosen. None: none has."""
    turns_taken: int = 0
    """Those that got some here."""
    first_token: bytes = b""
    """Of the answer, and what it follows from, as another worker says; empty: none has."""
    keep_s: int = 0
    """For how long the pool is to keep its pages; 0: as ever."""
    shared_tokens: int | None = None
    """The pool may let its pages behind so many tokens go. None: as ever."""
    marks_cache: bool = False
    """Its body has marks for caches, as Anthropic's API knows them."""
    pages: Any = None
    """Of a prefill, once they are named (`page_names.RequestPages`)."""
    session: str = ""
    """As the router calls it; empty: it is of none, or its client does not name it."""
    turn: int = 0
    """Of the session."""
    side_writes: list[asyncio.Future[bool]] = field(default_factory=list)
    """What is stored in the pool beside its pages."""
    record_keys: list[bytes] = field(default_factory=list)
    """The pool keys of that."""

    def leave(self) -> None:
        """The client left. What runs is aborted now; the engine's side aborts the rest once it is sent."""
        self.left.set()
        made = self.requests.values()
        running = [one for one in made if one.was_sent and not one.is_finished]
        self.is_cut_short = bool(running) or not any(one.was_sent for one in made)
        for one in running:
            one.abort()

    def complete(self) -> None:
        """The answer is complete, or nothing more of it comes."""
        self.ended_s = self.ended_s or time.monotonic()
        self.answered.set()

    def stop(self) -> None:
        """The end of this server aborted some of the request."""
        self.is_stopped = self.is_cut_short = True

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What its answer's head says of it."""
        timing = [] if self.first is None else [(TIMING_HEADER, self.first.timing())]
        return [*self.reuse.headers(), *timing]


_current: ContextVar[HttpRequest | None] = ContextVar("pdserve_http_request", default=None)


def current_request() -> HttpRequest | None:
    """The HTTP request in whose context this code runs."""
    return _current.get()


@contextlib.contextmanager
def _as_current(request: HttpRequest) -> Iterator[None]:
    token = _current.set(request)
    try:
        yield
    finally:
        _current.reset(token)


class RequestTracking:
    """ASGI middleware; see the module's docstring."""

    def __init__(
        self,
        app: AsgiApp,
        on_start: Callable[[HttpRequest], None] | None = None,
        tracer: Tracer | None = None,
        role: str = "",
    ) -> None:
        """`on_start` is told of every generating request, before the engine is. `tracer`: of the spans, which
        say the worker's role.
        """
        self._app = app
        self._on_start = on_start
        self._tracer = tracer
        self._role = role

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in GENERATING_PATHS:
            await self._app(scope, receive, send)
            return
        found = Reuse(parse_prefilled(_header(scope, PREFILLED_HEADER)))
        request = HttpRequest(
            _request_id(scope),
            scope["path"],
            found,
            turns_wanted=_turns(_header(scope, TURNS_HEADER)),
            first_token=_header(scope, FIRST_HEADER),
            keep_s=_number(_header(scope, KEEP_HEADER), 6) or 0,
            shared_tokens=_number(_header(scope, FINAL_HEADER), 9),
            **_session(_header(scope, SESSION_HEADER)),
        )
        if self._on_start is not None:
            self._on_start(request)
        connection = Connection(
            receive,
            send,
            on_left=request.leave,
            more_headers=request.headers,
            on_complete=request.complete,
            is_stopped=lambda: request.is_stopped,
        )
        reader = asyncio.create_task(connection.read())
        try:
            with _as_current(request), self._traced(request, scope, connection):
                await self._app(scope, connection.receive, connection.send)
        except BrokenOff as error:
            logger.info("request %s is not answered to its end: %s", request.request_id, error)
        finally:
            request.complete()
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    @contextlib.contextmanager
    def _traced(self, request: HttpRequest, scope: Scope, connection: Connection) -> Iterator[None]:
        if self._tracer is None:
            yield
            return
        said = {"url.path": request.path, "pdserve.request_id": request.request_id}
        name = f"{self._role} {request.path}"
        trace = self._tracer.begin(name, dict(scope["headers"]), request.started_s, **said)
        token = current_trace.set(trace)
        try:
            yield
        finally:
            current_trace.reset(token)
            at_s, status = request.started_s, connection.status
            for part, spent_s in request.first.parts_s.items() if request.first is not None else ():
                trace.part(part, at_s, at_s + spent_s)
                at_s += spent_s
            error = f"status {status}" if status is not None and status >= 500 else ""
            if request.left.is_set():
                error = "the client left"
            ended_s = request.ended_s or time.monotonic()
            trace.end(ended_s, error, **{"http.response.status_code": status})


def _request_id(scope: Scope) -> str:
    return _header(scope, REQUEST_ID_HEADER).decode("latin-1")[:256] or uuid.uuid4().hex


def _number(said: bytes, digits: int) -> int | None:
    """A whole number of at most so many digits; None for anything else: a hint is no reason for a refusal."""
    return int(said) if said.isdigit() and len(said) <= digits else None


def _session(said: bytes) -> dict[str, Any]:
    """The session and the turn. Nothing for what is malformed."""
    name, _, number = said.partition(b" ")
    turn = _number(number, 9)
    return {"session": name.decode("latin-1")[:64], "turn": turn} if turn else {}


def _turns(value: bytes) -> int | None:
    """None for a value that is malformed."""
    try:
        return int(value, 16) if value.isalnum() and len(value) <= MAX_TURNS_DIGITS else None
    except ValueError:
        return None


def _header(scope: Mapping[str, Any], wanted: bytes) -> bytes:
    return next((bytes(value) for name, value in scope["headers"] if name == wanted), b"")
