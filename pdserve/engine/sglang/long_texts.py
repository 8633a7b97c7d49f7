"""Long texts are tokenized beside SGLang's event loop.

SGLang (0.5.23) uses threads for OpenAI's chats only. It tokenizes Anthropic's chats, `/tokenize`, and the
texts of `/generate`, `/v1/completions` and `/v1/embeddings` (`TokenizerManager._tokenize_texts`) in its event
loop: then no stream goes on. Rust tokenizers let other threads run meanwhile.

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
