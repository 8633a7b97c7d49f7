"""Long texts are tokenized beside SGLang's event loop, and not at all where they cannot fit.

SGLang (0.5.23) tokenizes a text whole before it looks at its length. It uses threads for OpenAI's chats only.
Anthropic's chats, `/tokenize`, and the texts of `/generate`, `/v1/completions` and `/v1/embeddings`
(`TokenizerManager._tokenize_texts`) are tokenized in its event loop: then no stream goes on. Rust tokenizers
let other threads run meanwhile.

    text that has more tokens than the model takes, whatever they are    refused
    text of more than `SHORT_CHARS`, each `/tokenize`, and              in a thread; those of more than
    each of Anthropic's chats                                           `HUGE_CHARS` in threads of their own
    other text                                                          in the loop, which has its turn after
                                                                        each `SHORT_CHARS`
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec
from fastapi.responses import Response

from pdserve.engine.token_bytes import text_bound
from pdserve.text_bound import NO_BOUND, TextBound

logger = logging.getLogger(__name__)

SHORT_CHARS: Final = 4096
"""About 2 ms of tokenizing; a change of threads takes a twentieth of it."""
HUGE_CHARS: Final = 256 * 1024
"""Shorter texts take a fifth of a second at most. They do not wait for one of 32 MiB, which takes 28 s."""
_THREADS: Final = 2
"""Long texts at a time, and as many huge ones: each takes a core, and memory."""


class LongTexts:
    """Of one tokenizer manager."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._tokenize = manager._tokenize_texts
        self._long = ThreadPoolExecutor(_THREADS, "tokenize")
        self._huge = ThreadPoolExecutor(_THREADS, "tokenize-huge")
        self._since_turn_chars = 0
        self._bound = NO_BOUND
        manager._tokenize_texts = self.tokenize_texts

    @property
    def bound(self) -> TextBound:
        """What texts are refused by. None are, where SGLang truncates them, and until it is measured."""
        return NO_BOUND if self._manager.allow_auto_truncate else self._bound

    def measure(self) -> None:
        """Find the bound of the tokenizer, in a thread."""

        def run() -> None:
            try:
                self._bound = text_bound(self._manager.tokenizer)
            # boundary: a tokenizer may be anybody's code, and the worker serves without the bound
            except Exception as error:
                logger.warning(
                    "the tokenizer cannot be measured, long texts are not refused early: %s", error
                )

        threading.Thread(target=run, name="measure-tokenizer", daemon=True).start()

    async def tokenize_texts(self, texts: Any, is_cross_encoder: bool = False) -> Any:
        """In place of SGLang's `_tokenize_texts`. Raises ValueError, as SGLang does for what is too long."""
        if self._manager.async_dynamic_batch_tokenizer is not None:  # its own thread, and its own batches
            return await self._tokenize(texts, is_cross_encoder)
        size_chars = _chars(texts)
        if size_chars > SHORT_CHARS:
            if not is_cross_encoder:
                self.check(texts)
            return await self.beside(lambda: self._tokenize(texts, is_cross_encoder), size_chars)
        self._since_turn_chars += size_chars
        if self._since_turn_chars > SHORT_CHARS:
            self._since_turn_chars = 0
            await asyncio.sleep(0)
        return await self._tokenize(texts, is_cross_encoder)

    async def beside(self, work: Callable[[], Coroutine[Any, Any, Any]], size_chars: int) -> Any:
        """The result of a coroutine that waits for nothing, computed in a thread for texts of this size."""
        return await self.in_thread(lambda: _finish(work), size_chars)

    def in_thread(self, work: Callable[[], Any], size_chars: int) -> asyncio.Future[Any]:
        """The coming result of a function, computed in a thread for texts of this size."""
        context = contextvars.copy_context()
        threads = self._huge if size_chars > HUGE_CHARS else self._long
        return asyncio.get_running_loop().run_in_executor(threads, context.run, work)

    def check(self, texts: Any) -> None:
        """Raises ValueError, in SGLang's words, if one of the texts has too many tokens in any case."""
        manager, bound = self._manager, self.bound
        if not bound or manager.mm_processor is not None:  # a processor of media makes the prompt anew
            return
        for text in [texts] if isinstance(texts, str) else texts:
            tokens = bound.fewest_tokens(text) + manager.num_reserved_tokens
            if tokens >= manager.context_len:
                raise ValueError(
                    f"The input (at least {tokens} tokens) is longer than the model's context length "
                    f"({manager.context_len} tokens)."
                )


def install(long_texts: LongTexts) -> None:
    """Have `/tokenize` and Anthropic's chats work in threads too, and chats refused before their text is
    tokenized.
    """
    from sglang.srt.entrypoints.openai import serving_chat
    from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingTokenize

    handle = OpenAIServingTokenize._handle_non_streaming_request
    encode = serving_chat.parallel_prompt_encode
    only_tokenizes = contextvars.ContextVar("only_tokenizes", default=False)

    async def handle_beside(self: Any, adapted: Any, request: Any, raw_request: Any) -> Any:
        only_tokenizes.set(True)  # in the context of this request; such a text has any length
        size_chars = HUGE_CHARS + 1 if request.messages else _chars(request.prompt)
        return await long_texts.beside(
            lambda: _answered(handle(self, adapted, request, raw_request)), size_chars
        )

    def encode_checked(tokenizer: Any, text: Any, encode_kwargs: Any = None) -> Any:
        if isinstance(text, str) and not only_tokenizes.get():
            long_texts.check(text)
        return encode(tokenizer, text, encode_kwargs)

    OpenAIServingTokenize._handle_non_streaming_request = handle_beside
    serving_chat.parallel_prompt_encode = encode_checked
    _install_for_anthropic(long_texts)


def _install_for_anthropic(long_texts: LongTexts) -> None:
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

    count, convert = AnthropicServing.handle_count_tokens, OpenAIServingChat._convert_to_internal_request
    converted: contextvars.ContextVar[tuple[Any, asyncio.Future[Any]] | None]
    converted = contextvars.ContextVar("converted", default=None)

    async def count_beside(self: Any, request: Any, raw_request: Any) -> Any:
        return await long_texts.beside(lambda: count(self, request, raw_request), _body_bytes(raw_request))

    def convert_or_take(self: Any, request: Any, raw_request: Any = None) -> Any:
        ready = converted.get()
        if ready is not None and ready[0] is request:
            return ready[1].result()
        return convert(self, request, raw_request)

    def converting(handle: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        async def converted_beside(self: Any, chat: Any, request: Any, raw_request: Any) -> Any:
            serving = self.openai_serving_chat
            if not serving._validate_request(chat):  # else SGLang answers what is wrong
                making = long_texts.in_thread(
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


def _chars(texts: Any) -> int:
    """Of a text, a list of texts, or one of pairs of them."""
    if isinstance(texts, str):
        return len(texts)
    return sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts or ())


def _finish(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    begun = work()
    try:
        begun.send(None)
    except StopIteration as end:
        return end.value
    begun.close()
    raise RuntimeError("tokenizing waits for something: it cannot be done in a thread")
