"""SGLang's serving classes as a worker runs them: subclasses, which SGLang takes by `serving_chat_class`, or
whose objects take the places of its own in `app.state`.

| class | what is its own |
|---|---|
| chats | prompts keep their text (`exact_turns.Rendered`), and know how many answers they have; long ones are
  encoded once (`encodings`) |
| responses | the same |
| `/v1/messages` | a prompt is rendered and tokenized in a thread (`long_texts`) |
| `/tokenize` | a text is tokenized in a thread, and the answer's bytes are made there |

Two functions of SGLang's modules (0.5.23) have no class: the one that encodes a chat's text, and the one that
counts tokens as Anthropic's API does.

    input_tokens + cache_read_input_tokens + cache_creation_input_tokens = the prompt

SGLang tells what was read of caches, and never what was stored there. A client that marks its prompt
(`cache_control`) pays for three kinds of tokens. So of such a request the whole pages that were computed are
told as created: the next one finds them.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
from fastapi.responses import Response

from pdserve.engine.http.request import current_request
from pdserve.engine.sglang.encodings import Encodings
from pdserve.engine.sglang.exact_turns import Rendered
from pdserve.engine.sglang.long_texts import HUGE_CHARS, chars

_converted: contextvars.ContextVar[tuple[Any, asyncio.Future[Any]] | None]
_converted = contextvars.ContextVar("pdserve_converted", default=None)
"""A chat of `/v1/messages` that was made a request in a thread, and that request."""


def take_places(state: Any, page_tokens: int) -> None:
    """`state`: of SGLang's app, whose objects are there. Can be called again."""
    tokenize, messages, responses = _classes()
    state.openai_serving_tokenize.__class__ = tokenize
    state.anthropic_serving.__class__ = messages
    if (found := getattr(state, "openai_serving_responses", None)) is not None:  # of some models it is not
        found.__class__ = responses
    count_created(page_tokens)


@functools.cache
def chat_class() -> type[Any]:
    """For `TokenizerManager.serving_chat_class`. Imports SGLang."""
    from sglang.srt.entrypoints.openai import serving_chat

    encode, known = serving_chat.parallel_prompt_encode, Encodings()

    def encode_kept(tokenizer: Any, text: Any, encode_kwargs: Any = None) -> Any:
        ids = known.of(text, encode_kwargs, lambda: encode(tokenizer, text, encode_kwargs))
        return Rendered.of(ids, text)

    serving_chat.parallel_prompt_encode = encode_kept

    class Chat(serving_chat.OpenAIServingChat):  # type: ignore[misc]  # SGLang ships no types
        encodings = known

        def _convert_to_internal_request(self, request: Any, raw_request: Any = None) -> Any:
            ready = _converted.get()
            if ready is not None and ready[0] is request:
                return ready[1].result()
            converted, asked = super()._convert_to_internal_request(request, raw_request)
            _count_answers(getattr(converted, "input_ids", None), request.messages)
            return converted, asked

    return Chat


@functools.cache
def _classes() -> tuple[type[Any], type[Any], type[Any]]:
    """Of tokenizing, of Anthropic's messages, of responses. Imports SGLang."""
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
    from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
    from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingTokenize

    class Tokenize(OpenAIServingTokenize):  # type: ignore[misc]
        async def _handle_non_streaming_request(self, adapted: Any, request: Any, raw_request: Any) -> Any:
            size_chars = HUGE_CHARS + 1 if request.messages else chars(request.prompt)
            answer = super()._handle_non_streaming_request
            return await self.tokenizer_manager.text_threads.finish(
                lambda: _in_bytes(answer(adapted, request, raw_request)), size_chars
            )

    class Messages(AnthropicServing):  # type: ignore[misc]
        async def handle_count_tokens(self, request: Any, raw_request: Any) -> Any:
            count = super().handle_count_tokens
            threads = self.openai_serving_chat.tokenizer_manager.text_threads
            return await threads.finish(lambda: count(request, raw_request), _body_bytes(raw_request))

        async def _handle_non_streaming(self, chat: Any, request: Any, raw_request: Any) -> Any:
            await self._convert(chat, raw_request)
            return await super()._handle_non_streaming(chat, request, raw_request)

        async def _handle_streaming(self, chat: Any, request: Any, raw_request: Any) -> Any:
            await self._convert(chat, raw_request)
            return await super()._handle_streaming(chat, request, raw_request)

        async def _convert(self, chat: Any, raw_request: Any) -> None:
            """What it raises is raised where SGLang asks for the request."""
            serving = self.openai_serving_chat
            if serving._validate_request(chat):  # SGLang answers what is wrong
                return
            making = serving.tokenizer_manager.text_threads.in_thread(
                lambda: serving._convert_to_internal_request(chat, raw_request), _body_bytes(raw_request)
            )
            await asyncio.wait([making])
            _converted.set((chat, making))  # in the context of this request

    class Responses(OpenAIServingResponses):  # type: ignore[misc]
        async def _make_request(self, *args: Any, **kwargs: Any) -> Any:
            made = await super()._make_request(*args, **kwargs)
            messages, _, [ids], _ = made
            _count_answers(ids, messages)
            return made

    return Tokenize, Messages, Responses


def _count_answers(ids: Any, messages: Sequence[Any]) -> None:
    if isinstance(ids, Rendered):
        ids.answers = sum(_role_of(message) == "assistant" for message in messages)


def _role_of(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else getattr(message, "role", "")


def _body_bytes(raw_request: Any) -> int:
    said = raw_request.headers.get("content-length", "")
    return int(said) if said.isdigit() else HUGE_CHARS + 1


async def _in_bytes(answer: Coroutine[Any, Any, Any]) -> Any:
    """The answer in bytes, since a list of millions of tokens takes long to write."""
    from sglang.srt.entrypoints.openai.protocol import TokenizeResponse

    said = await answer
    if not isinstance(said, TokenizeResponse):
        return said
    return Response(msgspec.json.encode(said.__dict__), media_type="application/json")


def count_created(page_tokens: int) -> None:
    """Have SGLang's front of Anthropic's API count the tokens of created pages. Can be called again."""
    from sglang.srt.entrypoints.anthropic import serving

    usage_of = inspect.unwrap(serving._anthropic_usage_from_openai)

    @functools.wraps(usage_of)
    def usage_with_created(usage: Any, **parts: Any) -> Any:
        made = usage_of(usage, **parts)
        prompt, http = getattr(usage, "prompt_tokens", 0) or 0, current_request()
        if made.input_tokens is not None and prompt:
            is_marked = http is not None and http.marks_cache
            read = min(made.cache_read_input_tokens or 0, prompt)
            created = max(0, prompt // page_tokens * page_tokens - read) if is_marked else 0
            made.input_tokens = prompt - read - created
            if read or is_marked:
                made.cache_read_input_tokens = read
            if is_marked:
                made.cache_creation_input_tokens = created
        return made

    serving._anthropic_usage_from_openai = usage_with_created
