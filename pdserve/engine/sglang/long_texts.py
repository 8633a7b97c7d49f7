"""Long texts are tokenized beside SGLang's event loop.

SGLang (0.5.23) uses threads for OpenAI's chats only. Anthropic's chats, `/tokenize`, and the texts of
`/generate`, `/v1/completions` and `/v1/embeddings` (`TokenizerManager._tokenize_texts`) are tokenized in its
event loop: then no stream goes on. Rust tokenizers let other threads run meanwhile.

    text of more than `SHORT_CHARS`, each `/tokenize`, and   in a thread; those of more than `HUGE_CHARS` in
    each of Anthropic's chats                                threads of their own
    other text                                               in the loop
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec
from fastapi.responses import Response

SHORT_CHARS: Final = 4096
"""About 2 ms of tokenizing; a change of threads takes a twentieth of it."""
HUGE_CHARS: Final = 256 * 1024
"""Shorter texts take a fifth of a second at most. They do not wait for one of 32 MiB, which takes 28 s."""
_THREADS: Final = 2
"""Long texts at a time, and as many huge ones: each takes a core, and memory."""


class TextThreads:
    """The threads of one tokenizer manager; they end with the process."""

    def __init__(self) -> None:
        self._long = ThreadPoolExecutor(_THREADS, "tokenize")
        self._huge = ThreadPoolExecutor(_THREADS, "tokenize-huge")

    async def finish(self, work: Callable[[], Coroutine[Any, Any, Any]], size_chars: int) -> Any:
        """The result of a coroutine that waits for nothing, computed in a thread for texts of this size."""
        return await self.in_thread(lambda: _finished(work), size_chars)

    def in_thread(self, work: Callable[[], Any], size_chars: int) -> asyncio.Future[Any]:
        """The coming result of a function, computed in a thread for texts of this size."""
        context = contextvars.copy_context()
        threads = self._huge if size_chars > HUGE_CHARS else self._long
        return asyncio.get_running_loop().run_in_executor(threads, context.run, work)


def install(threads: TextThreads) -> None:
    """Have `/tokenize` and Anthropic's chats work in these threads. Imports SGLang's serving."""
    from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingTokenize

    handle = OpenAIServingTokenize._handle_non_streaming_request

    async def handle_beside(self: Any, adapted: Any, request: Any, raw_request: Any) -> Any:
        size_chars = HUGE_CHARS + 1 if request.messages else chars(request.prompt)
        return await threads.finish(
            lambda: _answered(handle(self, adapted, request, raw_request)), size_chars
        )

    OpenAIServingTokenize._handle_non_streaming_request = handle_beside
    _install_for_anthropic(threads)


def _install_for_anthropic(threads: TextThreads) -> None:
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

    count, convert = AnthropicServing.handle_count_tokens, OpenAIServingChat._convert_to_internal_request
    converted: contextvars.ContextVar[tuple[Any, asyncio.Future[Any]] | None]
    converted = contextvars.ContextVar("converted", default=None)

    async def count_beside(self: Any, request: Any, raw_request: Any) -> Any:
        return await threads.finish(lambda: count(self, request, raw_request), _body_bytes(raw_request))

    def convert_or_take(self: Any, request: Any, raw_request: Any = None) -> Any:
        ready = converted.get()
        if ready is not None and ready[0] is request:
            return ready[1].result()
        return convert(self, request, raw_request)

    def converting(handle: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        async def converted_beside(self: Any, chat: Any, request: Any, raw_request: Any) -> Any:
            serving = self.openai_serving_chat
            if not serving._validate_request(chat):  # else SGLang answers what is wrong
                making = threads.in_thread(
                    lambda: convert(serving, chat, raw_request), _body_bytes(raw_request)
                )
                await asyncio.wait([making])
                converted.set((chat, making))  # in the context of this request
            return await handle(self, chat, request, raw_request)

        return converted_beside

    AnthropicServing.handle_count_tokens = count_beside
    AnthropicServing._handle_non_streaming = converting(AnthropicServing._handle_non_streaming)
    AnthropicServing._handle_streaming = converting(AnthropicServing._handle_streaming)
    OpenAIServingChat._convert_to_internal_request = convert_or_take


def _body_bytes(raw_request: Any) -> int:
    said = raw_request.headers.get("content-length", "")
    return int(said) if said.isdigit() else HUGE_CHARS + 1


async def _answered(answer: Coroutine[Any, Any, Any]) -> Any:
    """The answer in bytes, since a list of millions of tokens takes long to write."""
    from sglang.srt.entrypoints.openai.protocol import TokenizeResponse

    said = await answer
    if not isinstance(said, TokenizeResponse):
        return said
    return Response(msgspec.json.encode(said.__dict__), media_type="application/json")


def chars(texts: Any) -> int:
    """Of a text, a list of texts, or one of pairs of them."""
    if isinstance(texts, str):
        return len(texts)
    return sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts or ())


def _finished(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    begun = work()
    try:
        begun.send(None)
    except StopIteration as end:
        return end.value
    begun.close()
    raise RuntimeError("tokenizing waits for something: it cannot be done in a thread")
