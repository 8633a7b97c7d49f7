"""Streams that can be taken over by another worker: marks in the stream here, going on with one from there.

**Marks.** A caller that sends `x-pdserve-marks: 1` finds, after the events of each step of a streamed answer,
a comment `: pd CHARACTERS FIRST TOKEN TOKEN ...`: with everything up to here it has so many characters of the
text, and these are the output tokens from number FIRST on. Events and their mark leave in one piece. The last
events (the finished step's, the finish reason, the usage, `[DONE]`) leave in one piece too, unmarked.
`: pd off` says that there will be no marks: an answer of several choices cannot be taken over.

**Going on.** `POST /pd/continue?endpoint=PATH` has as its body a line of JSON, `{"characters", "token_ids"}`,
and then the body that a client sent to PATH. It is served as that path would, with these differences:

- The tokens are added to the prompt (SGLang's `_send_one_request`), the limits of new tokens lowered by their
  number. A token whose character is not complete is left out, it will come again. So the model is given
  exactly what it had produced, and seeded sampling, which depends on the position, goes on as it would have
  (with --enable-deterministic-inference: without it SGLang 0.5.23 takes no seed). Where the rest would not be
  what it had been (log-probabilities, penalties, stop strings, grammars, as SGLang has them in the end), the
  answer is a 400.
- What the engine yields is given the earlier text and tokens in front, and counts as if all had been computed
  here. SGLang's own formatting sees first the earlier text, whose events are dropped, then the rest.

The text of the tokens is made as SGLang's detokenizer makes it (`init_incremental_detokenize`, 0.5.23): they
are decoded behind the prompt's last five tokens, whose text is then cut off.

A server that stops breaks off what runs (`connection.py`): another worker takes over from the last mark.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, MutableMapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any
from urllib.parse import parse_qs

import msgspec

from pdserve.engine.http.cache_report import clipped
from pdserve.engine.http.connection import AsgiApp, BrokenOff, Receive, Scope, Send, answer
from pdserve.engine.http.endpoints import ENDPOINTS, check_endpoint
from pdserve.engine.sglang.request_tracking import CONTINUE_PATH
from pdserve.errors import RequestError

ASK_HEADER = b"x-pdserve-marks"
MAX_BODY_BYTES = 64 * 1024 * 1024
DETOKENIZE_BEHIND = 5  # tokens of the prompt: INIT_INCREMENTAL_DETOKENIZATION_OFFSET
MAX_INCOMPLETE = 8  # tokens that one character may be spread over, and more
REPLACEMENT = "\ufffd"
_LOOKING_BACK = (
    *("frequency_penalty", "presence_penalty", "stop_strs", "stop_regex_strs", "watermark"),
    *("json_schema", "regex", "ebnf", "structural_tag"),
)


class SoFar(msgspec.Struct, frozen=True):
    """What the client has of an answer."""

    characters: int
    token_ids: list[int]


class Stream:
    """One marked stream: its events since the last mark, and what came before it if it is a continuation."""

    def __init__(self, send: Send, so_far: SoFar | None) -> None:
        self._send = send
        self._so_far = so_far
        self._events: list[bytes] = []
        self._is_marked = True
        self._is_begun = False
        self._drops = False
        self._text = ""  # of the tokens that were added to the prompt
        self._kept: list[int] = []
        self._delivered = ""
        self._marked_tokens = 0
        self._thought: int | None = None  # tokens of reasoning among them
        self._thought_is_over = False
        self._refusal: RequestError | None = None

    # --- what SGLang is told

    def extend(self, tokenized: Any, manager: Any) -> None:
        """Add the tokens so far to the prompt. Raises ValueError where that cannot be; `send` then answers
        400.
        """
        if self._so_far is None:
            return
        try:
            self._extend(self._so_far, tokenized, manager.tokenizer)
            self._count_thought(tokenized, manager.model_config)
        except ValueError as error:
            self._refusal = RequestError(400, str(error))
            raise

    def _extend(self, so_far: SoFar, tokenized: Any, tokenizer: Any) -> None:
        if tokenized.mm_inputs is not None or tokenized.input_ids is None:
            raise ValueError("an answer to this kind of prompt cannot be continued")
        if tokenized.return_logprob:
            raise ValueError("an answer with log-probabilities cannot be continued")
        sampling = tokenized.sampling_params
        if said := _looks_back(sampling):
            raise ValueError(f"an answer under {said} cannot be continued")
        prompt = list(tokenized.input_ids)
        tail = prompt[-DETOKENIZE_BEHIND:]

        def decode(ids: Sequence[int]) -> str:
            text: str = tokenizer.decode(
                ids,
                skip_special_tokens=sampling.skip_special_tokens,
                spaces_between_special_tokens=sampling.spaces_between_special_tokens,
            )
            return text

        behind = len(decode(tail))
        ids = so_far.token_ids
        whole = decode([*tail, *ids])[behind:]
        if len(whole) < so_far.characters:
            raise ValueError("the tokens do not make the text that was sent")
        self._delivered = whole[: so_far.characters]
        count = len(ids)
        while count > max(0, len(ids) - MAX_INCOMPLETE):
            self._text = decode([*tail, *ids[:count]])[behind:]
            if not self._text.endswith(REPLACEMENT) and whole.startswith(self._text):
                break
            count -= 1
        else:
            self._text, count = "", 0
        self._kept = ids[:count]
        self._marked_tokens = count
        tokenized.input_ids = type(tokenized.input_ids)("q", [*prompt, *self._kept])
        if sampling.max_new_tokens is not None:
            sampling.max_new_tokens = max(1, sampling.max_new_tokens - count)
        sampling.min_new_tokens = max(0, sampling.min_new_tokens - count)

    def _count_thought(self, tokenized: Any, model_config: Any) -> None:
        """Reasoning among the tokens so far, up to its end, as SGLang counts it (`update_reasoning_tokens`).
        Where the model begins it by itself SGLang cannot count the rest, and nothing is said.
        """
        if not tokenized.require_reasoning:
            return
        custom = tokenized.sampling_params.custom_params or {}
        end = list(custom.get("__sglang_reasoning_end_token_ids") or model_config.think_end_ids or ())
        ends = (i for i in range(len(end), len(self._kept) + 1) if self._kept[i - len(end) : i] == end)
        over_at = next(ends, None) if end else None
        self._thought_is_over = over_at is not None
        self._thought = len(self._kept) if over_at is None else over_at

    async def follow(
        self, contents: AsyncGenerator[Any, None], asked: Any, manager: Any
    ) -> AsyncIterator[Any]:
        """What the engine yields, as its caller may see it; a step's events are marked when the caller comes
        for the next step. Token ids that `asked` wants beside the text do not end where the text does.
        """
        begun = self._so_far is None
        may_go_on = not (asked.return_prompt_token_ids or manager.incremental_streaming_output)
        async with aclosing(contents):
            async for content in contents:
                if "index" in content or "text" not in content or not may_go_on:
                    await self._off()
                if not self._is_marked:
                    yield content
                    continue
                finish = content["meta_info"].get("finish_reason")
                if not begun and finish and finish.get("status_code"):
                    raise ValueError(self._refused(finish))
                step = self._shifted(content)
                if not begun:
                    begun = self._drops = True
                    yield self._earlier(step)
                    self._drops = False
                if finish:
                    yield step
                elif self._so_far is None or len(step["text"]) > self._so_far.characters:
                    yield step
                    await self._mark(step)

    def _refused(self, finish: dict[str, Any]) -> str:
        """SGLang aborted the request before it computed anything: `send` answers with its status. Returns its
        message.
        """
        status, message = int(finish["status_code"]), str(finish.get("message") or "the request was aborted")
        type_ = "invalid_request_error" if status < 500 else "server_error"
        self._refusal = RequestError(status, message, type_=type_)
        return message

    def _shifted(self, content: dict[str, Any]) -> dict[str, Any]:
        if self._so_far is None or "prompt_tokens" not in content["meta_info"]:  # aborted while it waited
            return content
        meta, count = dict(content["meta_info"]), len(self._kept)
        meta["prompt_tokens"] -= count
        meta["completion_tokens"] += count
        most = max(0, meta["prompt_tokens"] - 1)  # SGLang computes a prompt's last token itself
        meta["cached_tokens"] = min(meta.get("cached_tokens", 0), most)
        if meta.get("cached_tokens_details"):
            meta["cached_tokens_details"] = clipped(meta["cached_tokens_details"], most)
        thought = meta.pop("reasoning_tokens", 0)
        if self._thought is not None:
            meta["reasoning_tokens"] = self._thought + (0 if self._thought_is_over else thought)
        output_ids = [*self._kept, *content["output_ids"]]
        return {**content, "text": self._text + content["text"], "output_ids": output_ids, "meta_info": meta}

    def _earlier(self, content: dict[str, Any]) -> dict[str, Any]:
        """The step that the first worker ended with."""
        meta = {**content["meta_info"], "finish_reason": None, "completion_tokens": len(self._kept)}
        return {**content, "text": self._delivered, "output_ids": list(self._kept), "meta_info": meta}

    # --- what the caller is sent

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """For the app, in place of the server's `send`. Raises BrokenOff where the stream was refused:
        SGLang's `/generate` would say it in a stream that ends well.
        """
        if self._refusal is not None:
            await answer(self._send, self._refusal)
            raise BrokenOff(str(self._refusal))
        if message["type"] == "http.response.start":
            self._is_begun = True
            message = {**message, "headers": [*message.get("headers", ()), (ASK_HEADER, b"1")]}
        elif message["type"] == "http.response.body" and self._is_marked:
            if not self._drops:
                self._events.append(message.get("body", b""))
            if message.get("more_body", False):
                return
            message = {**message, "body": self._taken()}
        elif message["type"] == "http.response.body" and self._events:
            message = {**message, "body": self._taken() + message.get("body", b"")}
        await self._send(message)

    async def _mark(self, content: dict[str, Any]) -> None:
        first, count = self._marked_tokens, content["meta_info"]["completion_tokens"]
        ids = " ".join(map(str, content["output_ids"][first:count]))
        self._marked_tokens = count
        self._events.append(f": pd {len(content['text'])} {first} {ids}\n\n".encode())
        await self._send({"type": "http.response.body", "body": self._taken(), "more_body": True})

    async def _off(self) -> None:
        if self._is_marked:
            self._is_marked = False
            self._events.append(b": pd off\n\n")
            if not self._is_begun:  # SGLang makes the first event before it begins to answer
                return
            await self._send({"type": "http.response.body", "body": self._taken(), "more_body": True})

    def _taken(self) -> bytes:
        taken = b"".join(self._events)
        self._events.clear()
        return taken


_stream: ContextVar[Stream | None] = ContextVar("pdserve_stream", default=None)


class Continuing:
    """ASGI middleware, inside of `RequestTracking`; see the module's docstring."""

    def __init__(self, app: AsgiApp, tokenizer_manager: Callable[[], Any]) -> None:
        self._app = app
        self._tokenizer_manager = tokenizer_manager
        self._watched: Any = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        so_far = None
        if scope["type"] == "http" and scope["path"] == CONTINUE_PATH:
            try:
                scope, receive, so_far = await _unwrap(scope, receive)
            except RequestError as error:
                await answer(send, error)
                return
        elif scope["type"] != "http" or scope["path"] not in ENDPOINTS or not _asks(scope):
            await self._app(scope, receive, send)
            return
        self._watch(self._tokenizer_manager())
        stream = Stream(send, so_far)
        token = _stream.set(stream)
        try:
            await self._app(scope, receive, stream.send)
        finally:
            _stream.reset(token)

    def _watch(self, manager: Any) -> None:
        if self._watched is manager:
            return
        self._watched = manager
        generate, send_one = manager.generate_request, manager._send_one_request

        def generate_request(obj: Any, request: Any = None) -> Any:
            stream = _stream.get()
            contents = generate(obj, request)
            if stream is None or not getattr(obj, "stream", False):
                return contents
            return stream.follow(contents, obj, manager)

        async def send_one_request(tokenized: Any) -> Any:
            stream = _stream.get()
            if stream is not None:
                stream.extend(tokenized, manager)
            return await send_one(tokenized)

        manager.generate_request, manager._send_one_request = generate_request, send_one_request


def _looks_back(sampling: Any) -> str:
    """What makes the rest of an answer depend on more than the tokens so far, once they are part of the
    prompt; empty where nothing does. The router has looked at the client's body; these are SGLang's own
    SamplingParams, with what the model's generation_config.json and --preferred-sampling-params set. What
    SGLang notes for itself among `custom_params` serves grammars and counting.
    """
    set_for = {name: getattr(sampling, name) for name in _LOOKING_BACK}
    set_for["custom_params"] = [
        key for key in sampling.custom_params or () if not key.startswith("__sglang_")
    ]
    set_for["repetition_penalty"] = sampling.repetition_penalty != 1.0
    return ", ".join(name for name, value in set_for.items() if value)


def _asks(scope: Scope) -> bool:
    return any(name == ASK_HEADER for name, _ in scope["headers"])


async def _unwrap(scope: Scope, receive: Receive) -> tuple[Scope, Receive, SoFar]:
    """The request as the client sent it, and what it has of the answer. Raises RequestError."""
    endpoint = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("endpoint", [""])[0]
    check_endpoint(endpoint)
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestError(400, "the caller left before its request was whole")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            raise RequestError(413, f"The body is larger than {MAX_BODY_BYTES} bytes.")
        more = message.get("more_body", False)
    line, _, body = b"".join(parts).partition(b"\n")
    try:
        so_far = msgspec.json.decode(line, type=SoFar)
    except msgspec.MsgspecError as error:
        raise RequestError(400, f"The first line of the body: {error}") from None
    headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
    headers.append((b"content-length", b"%d" % len(body)))
    rest = asyncio.Queue[MutableMapping[str, Any]](1)
    rest.put_nowait({"type": "http.request", "body": body, "more_body": False})

    async def replay() -> MutableMapping[str, Any]:
        return await receive() if rest.empty() else rest.get_nowait()

    path = {"path": endpoint, "raw_path": endpoint.encode(), "query_string": b"", "headers": headers}
    return {**scope, **path}, replay, so_far
