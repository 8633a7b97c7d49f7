"""Which SGLang requests belong to which HTTP request, what they computed, and their end when the client
leaves.

SGLang names its requests itself (an HTTP request with `n = 3` makes several), notices a client that left
after up to 4 s (0.5.23: a poll of that period when not streaming, a sleep of 2 s when streaming), and forgets
a request once answered. A worker needs all three otherwise. So a pure-ASGI middleware opens an `HttpRequest`
record in a context variable, and wrapped methods of the tokenizer manager fill it in:

    _init_req_state      a request state (`ReqState`) was made for an SGLang request id
    _send_*_request      its prompt's token ids, extra key and salt are final, and it went to the scheduler
    _handle_batch_output what it found cached; not in that context, but for all requests that run
    generate_request     where the time to its first token went

A server that stops aborts what runs (`server.py`), which SGLang would answer as something complete. Such an
answer is broken off, see `connection.py`.

A client's `rid` and the like are not used: see `_disown`. Its own name for a request is `x-request-id`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fastapi import HTTPException

from pdserve.engine.http.cache_report import PREFILLED_HEADER, Reuse, parse_prefilled, replace_counts
from pdserve.engine.http.connection import AsgiApp, BrokenOff, Connection, Receive, Scope, Send
from pdserve.engine.http.endpoints import ENDPOINTS
from pdserve.engine.http.timing import TIMING_HEADER, FirstToken, WorkerMetrics, first_token
from pdserve.pages import namespace_seed, page_hashes, pool_key

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = b"x-request-id"
CONTINUE_PATH = "/pd/continue"
GENERATING_PATHS = frozenset({*ENDPOINTS, "/pd/prefill", CONTINUE_PATH})
_SGLANGS_OWN = ("rid", "lora_id", "mm_hashes", "positional_embed_overrides")
EMBEDDINGS_PATH = "/v1/embeddings"


@dataclass
class SglangRequest:
    """One request as the scheduler sees it. `state` is SGLang's ReqState, which outlives its registration."""

    rid: str
    state: Any
    input_ids: Sequence[int] | None = None  # None until it was tokenised
    extra_key: str | None = None
    cache_salt: str | None = None

    def conversation(self) -> list[int]:
        """Tokens whose KV exists when the request is finished: prompt and output but the last output token,
        which was sampled and never fed back.
        """
        if self.input_ids is None:
            return []
        output = list(self.state.output_ids)
        return [*self.input_ids, *output[:-1]]


@dataclass
class HttpRequest:
    """One HTTP request and the SGLang requests it made."""

    request_id: str
    path: str
    reuse: Reuse = field(default_factory=lambda: Reuse([]))
    first: FirstToken | None = None  # None until it is there
    requests: dict[str, SglangRequest] = field(default_factory=dict)
    left: asyncio.Event = field(default_factory=asyncio.Event)  # the client, before its answer was complete
    cut_short: bool = False  # it left while SGLang computed, or this server's end aborted it
    is_stopped: bool = False  # by this server's end
    answered: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class PageNames:
    """Names the pool pages of requests. `rank_suffixes` as in `pages.all_rank_suffixes`.

    SGLang stores the pages of a sequence in order, one batch after the other. So when the last full page of a
    sequence (its end) is committed, all of it that was going to be stored is.
    """

    page_size: int  # tokens
    rank_suffixes: Sequence[bytes]

    def of_prompts(self, request: HttpRequest) -> list[bytes]:
        """Pool keys of every full page of every prompt of the request, without repetition."""
        return self._keys(self._chains(request, _prompt))

    def of_conversations(self, request: HttpRequest) -> list[bytes]:
        """The same, of prompt and output."""
        return self._keys(self._chains(request, SglangRequest.conversation))

    def ends_of_prompts(self, request: HttpRequest) -> list[bytes]:
        """Pool keys of the last full page of every prompt."""
        return self._keys(chain[-1:] for chain in self._chains(request, _prompt))

    def ends_of_conversations(self, request: HttpRequest) -> list[bytes]:
        """The same, of prompt and output."""
        return self._keys(chain[-1:] for chain in self._chains(request, SglangRequest.conversation))

    def found_of_prompts(self, request: HttpRequest, cached_tokens: Mapping[str, int]) -> list[bytes]:
        """Pool keys of the pages of the prompts that SGLang may have had in its cache. `cached_tokens`: its
        count, by its request id.

        It looks for all of a prompt but the last token. So where it found all that it looks for, the last
        page of a prompt of whole pages counts as found: it is computed again whether it was there or not.
        """

        def found(made: SglangRequest) -> Sequence[int]:
            prompt, cached = _prompt(made), cached_tokens.get(made.rid, 0)
            is_all = cached // self.page_size == (len(prompt) - 1) // self.page_size
            return prompt if is_all else prompt[:cached]

        return self._keys(self._chains(request, found))

    def unnamed(self, request: HttpRequest, prompt_tokens: int) -> int:
        """How many pages the prompts of the request have, `prompt_tokens` in all, that cannot be named: those
        of images and the like.
        """
        named_tokens = sum(len(_prompt(made)) for made in request.requests.values())
        return max(0, prompt_tokens - named_tokens) // self.page_size * len(self.rank_suffixes)

    def _chains(
        self, request: HttpRequest, tokens: Callable[[SglangRequest], Sequence[int]]
    ) -> Iterator[list[bytes]]:
        for made in request.requests.values():
            yield page_hashes(tokens(made), self.page_size, namespace_seed(made.extra_key, made.cache_salt))

    def _keys(self, chains: Iterable[list[bytes]]) -> list[bytes]:
        hashes = dict.fromkeys(digest for chain in chains for digest in chain)
        return [pool_key(digest, suffix) for digest in hashes for suffix in self.rank_suffixes]


def _prompt(made: SglangRequest) -> Sequence[int]:
    return made.input_ids or []


_current: ContextVar[HttpRequest | None] = ContextVar("pdserve_http_request", default=None)


def current_request() -> HttpRequest | None:
    """The HTTP request in whose context this code runs."""
    return _current.get()


class RequestTracking:
    """ASGI middleware; see the module's docstring. `on_start` is told of every generating request, before
    SGLang is.
    """

    def __init__(
        self,
        app: AsgiApp,
        tokenizer_manager: Callable[[], Any],
        on_start: Callable[[HttpRequest], None] | None = None,
        metrics: WorkerMetrics | None = None,
    ) -> None:
        """`tokenizer_manager()` gives SGLang's TokenizerManager once it exists."""
        self._app = app
        self._tokenizer_manager = tokenizer_manager
        self._on_start = on_start
        self._metrics = metrics
        self._watched: Any = None
        self._reuse_of: dict[str, Reuse] = {}  # of what runs, by SGLang's request id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in GENERATING_PATHS:
            if scope["type"] == "http" and scope["path"] == EMBEDDINGS_PATH:
                self._watch(self._tokenizer_manager())
            await self._app(scope, receive, send)
            return
        manager = self._tokenizer_manager()
        self._watch(manager)
        told = parse_prefilled(_header(scope, PREFILLED_HEADER))
        request = HttpRequest(_request_id(scope), scope["path"], Reuse(told))
        if self._on_start is not None:
            self._on_start(request)

        def answered() -> None:
            for rid in request.requests:
                self._reuse_of.pop(rid, None)
            request.answered.set()

        connection = Connection(
            receive,
            send,
            on_left=lambda: _abort(request, manager),
            more_headers=lambda: _told(request),
            on_complete=answered,
            is_stopped=lambda: request.is_stopped,
        )
        reader = asyncio.create_task(connection.read())
        token = _current.set(request)
        try:
            await self._app(scope, connection.receive, connection.send)
        except BrokenOff as error:
            logger.info("request %s is not answered to its end: %s", request.request_id, error)
        finally:
            _current.reset(token)
            answered()
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    def _watch(self, manager: Any) -> None:
        if self._watched is manager:
            return
        self._watched = manager
        _wrap_init(manager, self._reuse_of)
        _wrap_output(manager, self._reuse_of)
        _wrap_generate(manager, self._metrics)
        _wrap_send(manager, "_send_one_request", lambda argument: [argument])
        _wrap_send(manager, "_send_batch_request", list)


def _abort(request: HttpRequest, manager: Any) -> None:
    """The client left: end what runs; what is not with the scheduler yet is ended as soon as it
    gets there.
    """
    request.left.set()
    running = [m for m in request.requests.values() if m.state.dispatched and not m.state.finished]
    sent = any(made.state.dispatched for made in request.requests.values())
    request.cut_short = bool(running) or not sent
    for made in running:
        manager.abort_request(rid=made.rid)


def _wrap_init(manager: Any, reuse_of: dict[str, Reuse]) -> None:
    original = manager._init_req_state

    def init_req_state(obj: Any, request: Any = None) -> Any:
        result = original(obj, request)
        http = _current.get()
        if http is not None:
            if not http.requests:
                http.reuse.begin(getattr(obj, "batch_size", 1), getattr(obj, "parallel_sample_num", 1))
            for rid in [obj.rid] if isinstance(obj.rid, str) else obj.rid:
                http.requests[rid] = SglangRequest(rid, manager.rid_to_state[rid])
                reuse_of[rid] = http.reuse
        return result

    manager._init_req_state = init_req_state


def _wrap_output(manager: Any, reuse_of: dict[str, Reuse]) -> None:
    original = manager._handle_batch_output

    async def handle_batch_output(output: Any) -> None:
        replace_counts(output, reuse_of)
        await original(output)

    manager._handle_batch_output = handle_batch_output


def _wrap_generate(manager: Any, metrics: WorkerMetrics | None) -> None:
    original = manager.generate_request

    async def generate_request(obj: Any, request: Any = None) -> AsyncIterator[Any]:
        http = _current.get()
        if http is not None or (request is not None and request.scope["path"] == EMBEDDINGS_PATH):
            _disown(obj)
        try:
            async with contextlib.aclosing(original(obj, request)) as contents:
                async for content in contents:
                    answers = content if isinstance(content, list) else [content]
                    if any(map(_is_aborted, answers)):
                        _note_abort(http, manager)
                    if http is not None and http.first is None:
                        http.first = first_token(answers)
                        if metrics is not None:
                            metrics.count(http.first, http.reuse.by_tier())
                    yield content
        except (ValueError, HTTPException):  # what was aborted with a status is raised where nothing streams
            _note_abort(http, manager)
            raise

    manager.generate_request = generate_request


def _note_abort(http: HttpRequest | None, manager: Any) -> None:
    """SGLang aborted some of the request: while this server ends, that is its doing."""
    if http is not None and getattr(manager, "pdserve_stopping", False):
        http.is_stopped = http.cut_short = True


def _is_aborted(answer: dict[str, Any]) -> bool:
    return ((answer.get("meta_info") or {}).get("finish_reason") or {}).get("type") == "abort"


def _disown(obj: Any) -> None:
    """Take out of a client's request what SGLang sets itself. The scheduler aborts every request whose id
    *begins* with the one that it is told, so no client may choose ids. The others change what a page's key
    stands for (pages under another's name), or end the scheduler when they are no tensors.
    """
    for name in _SGLANGS_OWN:
        if hasattr(obj, name):
            setattr(obj, name, None)


def _told(request: HttpRequest) -> list[tuple[bytes, bytes]]:
    """Headers of its answer."""
    timing = [] if request.first is None else [(TIMING_HEADER, request.first.timing())]
    return [*request.reuse.headers(), *timing]


def _wrap_send(manager: Any, name: str, tokenized: Callable[[Any], list[Any]]) -> None:
    original = getattr(manager, name)

    async def send(argument: Any) -> Any:
        http = _current.get()
        if http is None:
            return await original(argument)
        sent = []
        for one in tokenized(argument):
            made = http.requests.get(one.rid)
            if made is not None:
                _name(made, one)
                http.reuse.sent(one.rid)
                sent.append(made)
        result = await original(argument)
        if http.left.is_set():
            http.cut_short = True
            for made in sent:
                manager.abort_request(rid=made.rid)
        return result

    setattr(manager, name, send)


def _name(made: SglangRequest, tokenized: Any) -> None:
    """Record what names the request's pages, as the scheduler will see it (`Req.__init__`). Copied: the
    tokenizer manager turns these fields into bytes next.
    """
    if tokenized.input_ids is None or tokenized.mm_inputs is not None:
        return  # an image's tokens get their ids in the scheduler: its pages cannot be named here
    made.input_ids = list(tokenized.input_ids)
    made.extra_key = tokenized.extra_key
    if tokenized.lora_id is not None:
        made.extra_key = (tokenized.extra_key or "") + tokenized.lora_id
    made.cache_salt = tokenized.cache_salt or None


def _request_id(scope: Scope) -> str:
    return _header(scope, REQUEST_ID_HEADER).decode("latin-1")[:256] or uuid.uuid4().hex


def _header(scope: Scope, wanted: bytes) -> bytes:
    return next((bytes(value) for name, value in scope["headers"] if name == wanted), b"")
